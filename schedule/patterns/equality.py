"""Equality of graphs up to names and order, for golden tests of rewrites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import networkx as nx
from networkx.algorithms.isomorphism import DiGraphMatcher
from torch import fx, nn

from schedule.patterns.constants import describe
from schedule.patterns.normalize import normalize
from schedule.patterns.normalized_nodes import Attr, OpNode, operands


def graphs_equal(
    a: fx.Graph,
    b: fx.Graph,
    modules_a: Mapping[str, nn.Module] | None = None,
    modules_b: Mapping[str, nn.Module] | None = None,
) -> bool:
    """Check whether two graphs have the same operations with the same configuration and data edges.

    The names and the order of nodes are ignored. The order of operands counts unless they commute, and so do the
    order of the graph's arguments and the paths of parameters and modules. Dead nodes without effects are left out.
    """
    left, right = live_digraph(a, modules_a), live_digraph(b, modules_b)
    if _census(left) != _census(right):
        return False
    matcher = DiGraphMatcher(
        left,
        right,
        node_match=lambda x, y: x["label"] == y["label"],
        edge_match=lambda x, y: x["slots"] == y["slots"],
    )
    return bool(matcher.is_isomorphic())


def difference(
    a: fx.Graph,
    b: fx.Graph,
    modules_a: Mapping[str, nn.Module] | None = None,
    modules_b: Mapping[str, nn.Module] | None = None,
) -> str:
    """Describe the difference between two graphs, or return "" if they are equal.

    It lists the operations that only one of them has or, if there are none, the edges that differ.
    """
    if graphs_equal(a, b, modules_a, modules_b):
        return ""
    left, right = live_digraph(a, modules_a), live_digraph(b, modules_b)
    lines = []
    mine, theirs = (Counter(nx.get_node_attributes(g, "text").values()) for g in (left, right))
    for sign, extra in (("-", mine - theirs), ("+", theirs - mine)):
        lines += [f"{sign} {text}" + (f"  × {n}" if n > 1 else "") for text, n in sorted(extra.items())]
    if not lines:
        lines.append("the same operations, connected otherwise:")
        ours, others = _edges(left), _edges(right)
        lines += [f"- {edge}" for edge in sorted((ours - others).elements())]
        lines += [f"+ {edge}" for edge in sorted((others - ours).elements())]
    return "\n".join(lines)


def _edges(graph: nx.DiGraph) -> Counter[str]:
    text = nx.get_node_attributes(graph, "text")
    return Counter(f"{text[u]} -> {text[v]} as {', '.join(slots)}" for u, v, slots in graph.edges(data="slots"))


def live_digraph(graph: fx.Graph, modules: Mapping[str, nn.Module] | None) -> nx.DiGraph:
    """Return the live part of the normalized digraph, with nodes and edges labeled for comparison.

    Each label includes a color of everything below and above the node, so that the isomorphism test has
    little to try. Other attributes of nodes: ``text`` for messages, ``position`` of an argument (else -1), and
    ``is_end`` for nodes that are live by themselves.
    """
    normal = normalize(graph, modules)
    ends = [n for n in normal.nodes if n.op == "output" or n.mutates or _is_opaque(n)]
    live = set(ends).union(*(nx.ancestors(normal.digraph, n) for n in ends))
    arguments = [n for n in normal.nodes if n.op == "placeholder"]
    result = nx.DiGraph()
    for node in (n for n in normal.nodes if n in live):
        position = arguments.index(node) if node.op == "placeholder" else -1
        result.add_node(node, label=(node.op, node.mutates, position, _identity(node), _configuration(node)))
        text = describe(node) if position < 0 else f"argument {position}"
        result.nodes[node].update(text=text, position=position, is_end=node in ends)
        for slot, operand in _edges_of(node):
            slots = result.get_edge_data(operand, node, {"slots": ()})["slots"]
            result.add_edge(operand, node, slots=tuple(sorted((*slots, slot))))
    colors = _colored(result, {n: hash(data["label"]) for n, data in result.nodes(data=True)})
    for node, data in result.nodes(data=True):
        data["label"] = (data["label"], colors[node])
    return result


def _colored(graph: nx.DiGraph, labels: dict[OpNode, int]) -> dict[OpNode, int]:
    """Compute a color for each node from its label and everything below it, then everything above it."""
    colors = dict(labels)
    for node in graph:  # graph order: operands come first
        below = sorted((graph.edges[u, node]["slots"], colors[u]) for u in graph.predecessors(node))
        colors[node] = hash((labels[node], *below))
    whole = dict(colors)
    for node in reversed(list(graph)):
        above = sorted((graph.edges[node, v]["slots"], whole[v]) for v in graph.successors(node))
        whole[node] = hash((colors[node], *above))
    return whole


def _is_opaque(node: OpNode) -> bool:
    return node.definition is None and node.op not in ("placeholder", "get_attr")


def _identity(node: OpNode) -> Any:
    """Return the identity of an operation outside the vocabulary: its path, or the id of the callable."""
    if node.definition is not None or node.op in ("placeholder", "output"):
        return None
    return node.target if isinstance(node.target, str) else id(node.target)


def _edges_of(node: OpNode) -> list[tuple[str, OpNode]]:
    commuting = node.definition.commutative if node.commutes and node.definition else ()
    found = []
    for name, value in node.args.items():
        slot = "|".join(commuting) if name in commuting else name
        found += [(slot if isinstance(value, OpNode) else f"{slot}.{i}", o) for i, o in enumerate(operands(value))]
    return found


def _configuration(node: OpNode) -> tuple[Any, ...]:
    """Return the constants of ``node``, comparable and hashable.

    The constants among commuting operands are sorted.
    """
    commuting = node.definition.commutative if node.commutes and node.definition else ()
    loose = sorted(repr(_frozen(node.args[name])) for name in commuting)
    return (*loose, *((k, _frozen(v)) for k, v in sorted(node.args.items()) if k not in commuting))


def _frozen(value: Any) -> Any:
    if isinstance(value, OpNode):
        return "value"
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return ("slice", _frozen((value.start, value.stop, value.step)))
    if isinstance(value, bool):
        return ("flag", value)
    if isinstance(value, (int, float)):
        return ("number", float(value)) if value == value else ("number", "nan")
    return value.path if isinstance(value, Attr) else repr(value)


def text_of_constant(value: Any) -> str:
    """Return a constant as text: the same for equal constants, in every process."""
    if isinstance(value, OpNode):
        return "a value"
    if isinstance(value, Attr):
        return f"self.{value.path}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(text_of_constant, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {text_of_constant(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(map(text_of_constant, (value.start, value.stop, value.step)))})"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(int(value) if float(value).is_integer() else float(value))
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{getattr(value, '__module__', '')}.{name}"


def _census(graph: nx.DiGraph) -> Counter[Any]:
    return Counter(nx.get_node_attributes(graph, "label").values())
