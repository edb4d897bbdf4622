"""A graph as plain data, for pickling and copying: nodes by name, targets by reference."""

from __future__ import annotations

from typing import Any

from torch import fx

from schedule.capture.tracing.effects import KIND, LENGTH, QUIET, RULE
from schedule.capture.tracing.handed_containers import CONTAINER, READ
from schedule.capture.tracing.later_reads import AGAIN, LATER
from schedule.capture.tracing.layers import LAYER
from schedule.capture.tracing.memory import SHARES

_SAVED_META = (
    "spec",
    "source",
    "opaque",
    "object",
    "module",
    QUIET,
    RULE,
    "draws",
    "raises",
    "changes",
    "writes",
    CONTAINER,
    READ,
    KIND,
    LENGTH,
    LATER,
    AGAIN,
    LAYER,
    SHARES,
)


class _Ref:
    """Reference to a node in packed arguments."""

    def __init__(self, name: str) -> None:
        self.name = name


def pack_graph(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return each node as ``(op, name, target, args, kwargs, meta)``."""

    def reference(node: fx.Node) -> Any:
        return _Ref(node.name)

    return [
        (
            node.op,
            node.name,
            node.target,
            fx.node.map_arg(node.args, reference),
            fx.node.map_arg(node.kwargs, reference),
            {key: node.meta[key] for key in _SAVED_META if key in node.meta},
        )
        for node in graph.nodes
    ]


def unpack_graph(packed: list[tuple[Any, ...]]) -> fx.Graph:
    """Rebuild a graph from the result of :func:`pack_graph`."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def resolve(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _Ref) else value

    for op, name, target, args, kwargs, meta in packed:
        args, kwargs = fx.node.map_aggregate(args, resolve), fx.node.map_aggregate(kwargs, resolve)
        nodes[name] = graph.create_node(op, target, args, kwargs, name=name)
        nodes[name].meta.update(meta)
    return graph
