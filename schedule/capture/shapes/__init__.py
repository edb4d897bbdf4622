"""Sizes of results, as expressions of the sizes of inputs and parameters."""
