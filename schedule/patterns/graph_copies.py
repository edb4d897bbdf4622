"""Copies of graphs, records of erased nodes, and matches remapped from a graph to its copy."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import fx

from schedule.patterns.graph_match import GraphMatch

_ERASED = "_schedule_erased"


@dataclass(frozen=True)
class Erased:
    """Record of an erased node: its replacement node, if any, and the rewrite responsible."""

    successor: fx.Node | None
    by: str


def erased(graph: fx.Graph) -> dict[str, Erased]:
    """Return the records of all nodes erased from ``graph`` by rewrites, by node name."""
    return graph.__dict__.setdefault(_ERASED, {})


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with the same names, metadata and order.

    The names of erased nodes are not used again.
    """
    twin = fx.Graph(owning_module=graph.owning_module, tracer_cls=graph._tracer_cls)
    of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        made = twin.node_copy(node, of.__getitem__)
        if made.name != node.name:
            made._rename(node.name)
        of[node] = made
    twin._codegen = copy.deepcopy(graph._codegen)
    for name, was in erased(graph).items():
        twin._graph_namespace.create_name(name, None)
        erased(twin)[name] = Erased(of.get(was.successor) if was.successor is not None else None, was.by)
    return twin


def split_linear(graph: fx.Graph) -> int:
    """Rewrite ``F.linear(x, w, b)`` as ``F.linear(x, w) + b`` in place, to let patterns match the sum.

    Returns:
        The number of calls split. The sum rounds once more than the single call.
    """
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target is F.linear]
    count = 0
    for node in calls:
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if not isinstance(bias, fx.Node):
            continue
        source, weight = (
            node.args[i] if len(node.args) > i else node.kwargs[k] for i, k in ((0, "input"), (1, "weight"))
        )
        with graph.inserting_before(node):
            product = graph.call_function(F.linear, (source, weight))
            total = graph.call_function(operator.add, (product, bias))
        product.meta, total.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        erased(graph)[node.name] = Erased(total, "split_linear")
        count += 1
    return count


class LostNode(Exception):
    """Raised for a missing node of a match. ``erased`` names the rewrite, if one took the node out."""

    def __init__(self, node: fx.Node, erased: Erased | None) -> None:
        super().__init__(node.name)
        self.node, self.erased = node, erased


class Follower:
    """Map of matches into a later state of their graph, by the names of nodes.

    Args:
        graph: that graph itself, a copy of it, or a copy that was rewritten since.
        origin: name of a node of an inlined module → name of the call that stands for it where it is not inlined.
    """

    def __init__(self, graph: fx.Graph, origin: Mapping[str, str] | None = None) -> None:
        self.graph, self.origin, self.erased = graph, origin or {}, erased(graph)
        self.names: dict[str, fx.Node] = {node.name: node for node in graph.nodes}

    def node(self, node: fx.Node, consumed: Collection[fx.Node]) -> fx.Node:
        """Return ``node`` itself, its copy, or, unless it is consumed, the node in its place.

        Raises:
            LostNode: it is gone.
        """
        twin = self.names.get(node.name)
        if twin is node:
            return node
        if twin is not None and twin.graph is not node.graph and (twin.op, twin.target) == (node.op, node.target):
            return twin
        if node not in consumed:
            was = self.erased.get(node.name)
            while was is not None and was.successor is not None:
                if self.names.get(was.successor.name) is was.successor:
                    return was.successor
                was = self.erased.get(was.successor.name)
            call = self.names.get(self.origin.get(node.name, ""))
            if call is not None and call.op == "call_module":
                return call
        raise LostNode(node, self.erased.get(node.name))

    def match(self, graph_match: GraphMatch) -> GraphMatch:
        """Return the same match in this graph.

        Raises:
            LostNode: a node that it consumes or reads is gone.
        """
        consumed = frozenset(graph_match.nodes)

        def move(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self.node(value, consumed)
            return tuple(map(move, value)) if isinstance(value, tuple) else value

        return replace(
            graph_match,
            graph=self.graph,
            nodes=move(graph_match.nodes),
            outputs=move(graph_match.outputs),
            inputs={name: move(value) for name, value in graph_match.inputs.items()},
            scalars={name: move(value) for name, value in graph_match.scalars.items()},
            binding={},
        )
