"""Capture of a model: example inputs, one recorded run, and tracing to graphs with guards."""
