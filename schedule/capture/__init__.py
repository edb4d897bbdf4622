"""What a model's code does, seen once: example inputs, one recorded run, tracing to graphs with guards."""
