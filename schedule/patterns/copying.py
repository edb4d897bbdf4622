"""Copies of graphs, records of erased nodes, and matches remapped from a graph to its copy."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import fx

from schedule.patterns.graph_match import GraphMatch
from schedule.util.errors import MatchError

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


def rebase(graph_match: GraphMatch, graph: fx.Graph, names: Mapping[str, fx.Node]) -> GraphMatch:
    """Remap a match to ``graph``, its own graph or a copy of it, by the names of the nodes."""
    gone = erased(graph)

    def here(node: fx.Node) -> fx.Node:
        name = node.name
        if name in names:
            twin = names[name]
            if twin is node or (twin.graph is not node.graph and (twin.op, twin.target) == (node.op, node.target)):
                return twin
        elif name in gone:
            successor = gone[name].successor
            if successor is not None and node not in consumed:
                return here(successor) if successor.name not in names else names[successor.name]
            raise MatchError(
                f"{name} was already consumed by {gone[name].by or 'another rewrite'}",
                node=node,
                fix="search again after each rewrite",
            )
        raise MatchError(
            f"the match of {graph_match.pattern.name} is from another graph: there is no such {name} here",
            node=node,
            fix="search this graph and use what that finds",
        )

    def move(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return here(value)
        return tuple(move(item) for item in value) if isinstance(value, tuple) else value

    consumed = frozenset(graph_match.nodes)
    return replace(
        graph_match,
        graph=graph,
        nodes=move(graph_match.nodes),
        outputs=move(graph_match.outputs),
        inputs={k: move(v) for k, v in graph_match.inputs.items()},
        scalars={k: move(v) for k, v in graph_match.scalars.items()},
        binding={},
    )
