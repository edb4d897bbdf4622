"""Ranks: the mesh, their groups, collectives with and without gradients, agreement."""
