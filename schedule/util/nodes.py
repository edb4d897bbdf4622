"""Places in a graph."""

from __future__ import annotations

from torch import fx


def last_node(graph: fx.Graph) -> fx.Node:
    """Return the last node of a graph: the nodes of torch 2.11, reversed, are no iterator."""
    return next(iter(reversed(graph.nodes)))
