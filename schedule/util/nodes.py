"""Places in a graph."""

from __future__ import annotations

from torch import fx


def last_node(graph: fx.Graph) -> fx.Node:
    """Return the last node of a graph: the nodes of torch 2.11, reversed, are no iterator."""
    return next(iter(reversed(graph.nodes)))


def named_input(graph: fx.Graph, path: str) -> fx.Node:
    """Add an input named like the attribute at ``path``, by a valid name of Python that ``graph`` does not have yet."""
    node = graph.placeholder(path.replace(".", "_"))
    node.target = node.name
    return node
