"""The nodes of normalized graphs, the same for models and patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from schedule.capture.recording.specs import TensorSpec
from schedule.patterns.ops import OpDef


class Attr:
    """A parameter or buffer, by its dotted path, that no ``get_attr`` node of the graph holds yet.

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
    """One operation with its arguments by name; a node of the ``networkx.DiGraph``.

    Attributes:
        op: canonical name; ``"placeholder"``, ``"get_attr"``, ``"output"``, ``"call_module"`` are the
            graph's own.
        args: argument name → value: an OpNode, a constant, or a tuple, dict or slice of these.
        fx: the node it comes from; two OpNodes share one where a call stands for two operations.
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
        """What the recorded run saw here: a TensorSpec, a number, a tuple of them, or None."""
        if self.fx is not None:
            return self.fx.meta.get("spec")
        if self.attr is not None and self.attr.value is not None:
            return TensorSpec.of(self.attr.value)
        return None

    @property
    def is_metadata(self) -> bool:
        """Whether it only reads sizes, dtypes or devices, or computes with plain numbers."""
        if self.definition is not None and self.definition.metadata:
            return True
        return is_number(self.spec) and self.op not in ("placeholder", "get_attr", "call_module")

    @property
    def commutes(self) -> bool:
        """Whether its first two arguments may change places (an ``alpha`` other than 1 forbids it)."""
        definition = self.definition
        return definition is not None and bool(definition.commutative) and self.args.get("alpha", 1) == 1


def is_number(value: Any) -> bool:
    """Whether a spec or a constant is a plain number or flag."""
    return isinstance(value, (bool, int, float, complex))


def operands(value: Any) -> Iterator[OpNode]:
    """Every OpNode in an argument, in order."""
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
    """Whether no OpNode is in an argument."""
    return not isinstance(value, OpNode) and next(operands(value), None) is None


def map_operands(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting with every fx node replaced by ``change(node)``; lists become tuples."""
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
    """A normalized graph: the ``networkx.DiGraph`` and its indices.

    Attributes:
        digraph: OpNodes joined by data edges; an edge's ``slots`` name the arguments it feeds.
        nodes: OpNodes in graph order.
        by_op: canonical name → OpNodes in graph order.
        calls: every module call, whatever operation it became.
        of: fx node → the OpNode that is its value.
        parts: fx node → all of its OpNodes, where there are several.
    """

    def __init__(self) -> None:
        self.digraph: nx.DiGraph = nx.DiGraph()
        self.nodes: list[OpNode] = []
        self.by_op: dict[str, list[OpNode]] = {}
        self.calls: list[OpNode] = []
        self.of: dict[fx.Node, OpNode] = {}
        self.parts: dict[fx.Node, list[OpNode]] = {}
        self.users: dict[OpNode, list[OpNode]] = {}

    def users_of(self, node: OpNode) -> list[OpNode]:
        """The operations that read ``node``, in graph order, each once."""
        return self.users.get(node, [])

    def add(self, node: OpNode) -> OpNode:
        """Append ``node``, in graph order, with the edges from its operands."""
        node.index = len(self.nodes)
        self.nodes.append(node)
        self.by_op.setdefault(node.op, []).append(node)
        return node

    def connect(self) -> None:
        """Build the digraph once all nodes are there."""
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
