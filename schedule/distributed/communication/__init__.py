"""Mesh, process groups, collectives with and without gradients, and cross-rank consistency checks."""
