"""Graphs as text that does not depend on the names and the order of nodes.

Equal graphs, in the sense of :func:`schedule.patterns.equality.graphs_equal`, have the same lines::

    %0 = linear(input=x0, weight=self.c_fc.weight)
    %1 = add(input=%0, other=self.c_fc.bias)
    %2 = gelu(input=%1, approximate='tanh')
    return %2
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
from torch import fx, nn

from schedule.patterns.equality import live_digraph, text_of_constant
from schedule.patterns.normalized_nodes import Attr, OpNode, operands


@dataclass(frozen=True)
class Line:
    """One operation of a graph.

    Attributes:
        text: the operation with its operands.
        source: the line of code that it comes from; "" if unknown.
    """

    text: str
    source: str = ""


def canonical_lines(graph: fx.Graph, modules: Mapping[str, nn.Module] | None = None) -> list[Line]:
    """Return one line for each operation of ``graph``, operands first, the result last.

    Operations that nothing needs are left out. Operands that commute, and effects that do not depend on each other,
    have an order of their own, by what they are computed from.

    Args:
        graph: the graph.
        modules: the modules that it calls, by path; they tell what a call computes.
    """
    return _Text(live_digraph(graph, modules)).lines()


class _Text:
    def __init__(self, graph: nx.DiGraph) -> None:
        self._graph = graph
        self._keys: dict[OpNode, str] = {}
        self._read: dict[OpNode, tuple[str, ...]] = {}
        self._depth: dict[OpNode, int] = {}
        for node in nx.topological_sort(graph):
            self._keys[node], self._read[node] = self._key(node), self._reads(node)
            self._depth[node] = 1 + max((self._depth[each] for each in graph.predecessors(node)), default=0)
        self._names: dict[OpNode, str] = {}
        self._lines: list[Line] = []
        for node in (each for each in graph if each.op == "placeholder"):
            self._names[node] = f"x{graph.nodes[node]['position']}"

    def lines(self) -> list[Line]:
        """Write what the result is computed from, then the other effects, then the result."""
        last = [node for node in self._graph if node.op == "output"]
        ends = [node for node in self._graph if self._graph.nodes[node]["is_end"] and node.op != "output"]
        for node in (*(o for end in last for o in self._operands(end)), *sorted(ends, key=self._order)):
            self._write(node)
        for end in last:
            self._lines.append(Line(f"return {self._value(end.args['value'])}"))
        return self._lines

    def _key(self, node: OpNode) -> str:
        """Return a digest of ``node`` and of all it is computed from."""
        below = sorted(f"{self._graph.edges[u, node]['slots']} {self._keys[u]}" for u in self._graph.predecessors(node))
        return hashlib.sha256(repr((self._operation(node), below)).encode()).hexdigest()

    def _reads(self, node: OpNode) -> tuple[str, ...]:
        """Return the arguments and parameters that ``node`` is computed from, the first ones by name."""
        own = {text_of_constant(value) for value in node.args.values() if isinstance(value, Attr)}
        if node.op in ("placeholder", "get_attr"):
            own.add(f"self.{node.target}" if node.op == "get_attr" else f"x{self._graph.nodes[node]['position']}")
        return tuple(sorted(own.union(*(self._read[each] for each in self._graph.predecessors(node)))))[:_MOST_READ]

    def _operation(self, node: OpNode) -> tuple[str, ...]:
        settings = tuple(f"{name}={text_of_constant(value)}" for name, value in sorted(node.args.items()))
        return (_name(node), str(self._graph.nodes[node]["position"]), *settings)

    def _operands(self, node: OpNode) -> list[OpNode]:
        """Return the operands in the order to write them, which does not depend on that of the arguments."""
        return sorted(
            (each for value in node.args.values() for each in operands(value) if each in self._graph), key=self._order
        )

    def _arguments(self, node: OpNode) -> list[tuple[str, Any]]:
        """Return the arguments by name, those that commute in an order of their own."""
        commuting = node.definition.commutative if node.commutes and node.definition else ()
        loose = sorted((node.args[name] for name in commuting), key=self._order)
        return [*zip(commuting, loose, strict=True), *((k, v) for k, v in node.args.items() if k not in commuting)]

    def _order(self, value: Any) -> tuple[int, tuple[str, ...], int, str]:
        """Return the key that operands which commute, and lines, are sorted by.

        It is mostly what they read, so that a change of the operations moves few lines.
        """
        if not isinstance(value, OpNode):
            return 3, (), 0, text_of_constant(value)
        order = _KINDS.get(value.op, 0), self._read.get(value, ()), self._depth.get(value, 0)
        return *order, self._keys.get(value, "")

    def _write(self, node: OpNode) -> None:
        pending = [(node, iter(self._operands(node)))]
        while pending:  # graphs are deep
            node, rest = pending[-1]
            operand = next((each for each in rest if not self._is_written(each)), None)
            if operand is not None:
                pending.append((operand, iter(self._operands(operand))))
                continue
            pending.pop()
            if not self._is_written(node):
                self._add(node)

    def _is_written(self, node: OpNode) -> bool:
        return node in self._names or node.op == "get_attr"

    def _add(self, node: OpNode) -> None:
        self._names[node] = f"%{len(self._lines)}"
        shown = [(k, v) for k, v in self._arguments(node) if k not in _UNNAMED and not _is_default(node, k, v)]
        given = ", ".join(f"{'' if k.isdigit() else f'{k}='}{self._value(v)}" for k, v in shown)
        changes = " (in place)" if node.mutates else ""
        source = str(node.fx.meta.get("source") or "") if node.fx is not None else ""
        self._lines.append(Line(f"{self._names[node]} = {_name(node)}({given}){changes}", source))

    def _value(self, value: Any) -> str:
        if isinstance(value, OpNode):
            return self._names.get(value) or f"self.{value.target}"
        if isinstance(value, (tuple, list)) and next(operands(value), None) is not None:
            return f"({', '.join(map(self._value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._value(each)}" for key, each in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        return text_of_constant(value)


_KINDS = {"placeholder": 1, "get_attr": 2}  # results come first, constants last
_MOST_READ = 64
_UNNAMED = ("target",)  # the name of the operation says it


def _name(node: OpNode) -> str:
    if node.op == "call_module":
        return f"self.{node.target}"
    if node.definition is not None or isinstance(node.target, str) or node.target is None:
        return node.op
    name = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.op)}"
    return name.lstrip(".").removeprefix("torch._ops.")


def _is_default(node: OpNode, name: str, value: Any) -> bool:
    if node.definition is None or next(_all(value), None) is not None:
        return False
    return bool(value == node.definition.params.get(name)) and (value is None or isinstance(value, bool) or value == 1)


def _all(value: Any) -> Iterator[Any]:
    """Yield the nodes and parameters in an argument."""
    yield from operands(value)
    if isinstance(value, Attr):
        yield value
