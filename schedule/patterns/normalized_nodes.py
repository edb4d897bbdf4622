"""Nodes of normalized graphs, shared by models and patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from schedule.capture import TensorSpec
from schedule.patterns.ops import OpDef


class Attr:
    """Parameter or buffer, by its dotted path, without a ``get_attr`` node in the graph yet.

    A module call such as ``nn.Linear`` reads its weight without a node for it; once matched, the rewritten
    graph reads the path itself.
    """

    __slots__ = ("path", "value")

    def __init__(self, path: str, value: torch.Tensor | None = None) -> None:
        self.path, self.value = path, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attr) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"Attr({self.path!r})"


class OpNode:
    """One operation with its arguments by name, as a node of the ``networkx.DiGraph``.

    Attributes:
        op: canonical name; ``"placeholder"``, ``"get_attr"``, ``"output"``, ``"call_module"`` are the
            graph's own.
        args: argument name → value: an OpNode, a constant, or a tuple, dict or slice of these.
        fx: the node it comes from; two OpNodes share one if a call stands for two operations.
        index: position in the graph.
        definition: its row of the vocabulary, None if unknown.
        target: the callable, method name or path that was called.
        module: the called module, if it is one.
        mutates: whether it changes its first argument in place.
        attr: the :class:`Attr` it stands for, if any.
    """

    __slots__ = ("args", "attr", "definition", "fx", "index", "module", "mutates", "op", "target")

    def __init__(
        self,
        op: str,
        args: Mapping[str, Any],
        fx_node: fx.Node | None = None,
        index: int = -1,
        definition: OpDef | None = None,
        target: Any = None,
    ) -> None:
        self.op, self.args, self.fx, self.index = op, args, fx_node, index
        self.definition, self.target = definition, target
        self.module: nn.Module | None = None
        self.mutates = False
        self.attr: Attr | None = None

    def __repr__(self) -> str:
        return f"{self.name}: {self.op}"

    @property
    def name(self) -> str:
        """The fx node's name, or the parameter's path."""
        if self.fx is not None:
            return self.fx.name
        return self.attr.path if self.attr is not None else f"{self.op}_{self.index}"

    @property
    def spec(self) -> Any:
        """Value seen in the recorded run: a TensorSpec, a number, a tuple of them, or None."""
        if self.fx is not None:
            return self.fx.meta.get("spec")
        if self.attr is not None and self.attr.value is not None:
            return TensorSpec.of(self.attr.value)
        return None

    @property
    def is_metadata(self) -> bool:
        """Whether the node only reads sizes, dtypes or devices, or computes with plain numbers."""
        if self.definition is not None and self.definition.metadata:
            return True
        return is_number(self.spec) and self.op not in ("placeholder", "get_attr", "call_module")

    @property
    def is_view(self) -> bool:
        """Whether its definition says that it may share memory with its first operand."""
        return self.definition is not None and self.definition.view

    @property
    def source(self) -> OpNode:
        """The value that it is a view of, or itself."""
        node = self
        while node.is_view:
            node = next(operands(node.args))
        return node

    @property
    def commutes(self) -> bool:
        """Whether the first two arguments may be swapped (an ``alpha`` other than 1 forbids it)."""
        definition = self.definition
        return definition is not None and bool(definition.commutative) and self.args.get("alpha", 1) == 1


def is_number(value: Any) -> bool:
    """Check whether a spec or a constant is a plain number or flag."""
    return isinstance(value, (bool, int, float, complex))


def operands(value: Any) -> Iterator[OpNode]:
    """Yield every OpNode in an argument, in order."""
    if isinstance(value, OpNode):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from operands(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from operands(item)
    elif isinstance(value, slice):
        yield from operands((value.start, value.stop, value.step))


def is_constant(value: Any) -> bool:
    """Check whether an argument contains no OpNode."""
    return not isinstance(value, OpNode) and next(operands(value), None) is None


def map_operands(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same nesting with every fx node replaced by ``change(node)``, and lists as tuples."""
    if isinstance(value, fx.Node):
        return change(value)
    if isinstance(value, (tuple, list)):
        return tuple([map_operands(item, change) for item in value])
    if isinstance(value, dict):
        return {key: map_operands(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_operands(item, change) for item in (value.start, value.stop, value.step)))
    return value


class NormalGraph:
    """Normalized graph: the ``networkx.DiGraph`` and its indices.

    Attributes:
        digraph: OpNodes joined by data edges; an edge's ``slots`` name the arguments it feeds.
        nodes: OpNodes in graph order.
        by_op: canonical name → OpNodes in graph order.
        calls: every module call, whatever operation it became.
        of: fx node → the OpNode that is its value.
        parts: fx node → all of its OpNodes, if there are several.
        passed: fx nodes that only pass their argument on, and have its OpNode.
    """

    def __init__(self) -> None:
        self.digraph: nx.DiGraph = nx.DiGraph()
        self.nodes: list[OpNode] = []
        self.by_op: dict[str, list[OpNode]] = {}
        self.calls: list[OpNode] = []
        self.of: dict[fx.Node, OpNode] = {}
        self.parts: dict[fx.Node, list[OpNode]] = {}
        self.passed: set[fx.Node] = set()
        self.users: dict[OpNode, list[OpNode]] = {}

    def users_of(self, node: OpNode) -> list[OpNode]:
        """Return the operations reading ``node``, in graph order, each once."""
        return self.users.get(node, [])

    def add(self, node: OpNode) -> OpNode:
        """Append ``node`` in graph order, without its edges."""
        node.index = len(self.nodes)
        self.nodes.append(node)
        self.by_op.setdefault(node.op, []).append(node)
        return node

    def connect(self) -> None:
        """Build the digraph and its edges after all nodes have been added."""
        edges: dict[tuple[OpNode, OpNode], tuple[str, ...]] = {}
        users = self.users
        for node in self.nodes:
            for slot, value in node.args.items():
                for operand in (value,) if type(value) is OpNode else operands(value):
                    key = (operand, node)
                    if key in edges:
                        edges[key] += (slot,)
                        continue
                    edges[key] = (slot,)
                    users.setdefault(operand, []).append(node)
        self.digraph.add_nodes_from(self.nodes)
        self.digraph.add_edges_from((a, b, {"slots": slots}) for (a, b), slots in edges.items())
