"""What a traced forward reads and writes besides its tensors.

Its code runs instrumented, and each read becomes a guard.
"""
