"""Modules of a model as nodes, with their graphs, matches and edit history."""
