"""Python state read and written by a traced forward.

The forward runs as instrumented code, and each read of outside state becomes a guard.
"""
