"""Saved state of everything reachable from a model, compared and restored."""
