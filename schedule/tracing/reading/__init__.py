"""What a traced forward reads and writes besides its tensors: its code runs instrumented, and each read becomes a guard."""
