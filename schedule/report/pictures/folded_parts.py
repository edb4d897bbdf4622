"""Folding of the parts of a graph far from a change into one box each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import networkx as nx

from schedule.report.pictures.flow import Flow, Node
from schedule.util.wording import counted

_FEWEST = 3
_LONGEST_TIP = 20


def folded(flow: Flow, changed: Collection[str]) -> Flow:
    """Return ``flow`` with connected parts of at least three unchanged nodes as one box each.

    Changed nodes, their neighbors, calls of modules and the output stay. The nodes of a part have the same such nodes
    above them, and the same below: so no path leaves a part and comes back, and the folded graph has no cycle.

    Args:
        flow: the drawn nodes and edges.
        changed: names of the changed nodes; with none, nothing is folded.
    """
    graph = nx.DiGraph(flow.edges)
    graph.add_nodes_from(range(len(flow.nodes)))
    centers = [number for number, node in enumerate(flow.nodes) if node.name in changed]
    kept = {number for number, node in enumerate(flow.nodes) if node.kind in ("call", "output")}.union(
        centers, *(nx.all_neighbors(graph, center) for center in centers)
    )
    parts = _parts(graph, kept) if centers else []
    if not parts:
        return flow
    part_of = {number: part[0] for part in parts for number in part}
    boxes = {part[0]: _box([flow.nodes[number] for number in part]) for part in parts}
    shown = [number for number in range(len(flow.nodes)) if part_of.get(number, number) == number]
    position = {number: at for at, number in enumerate(shown)}
    ends = ((position[part_of.get(a, a)], position[part_of.get(b, b)]) for a, b in flow.edges)
    edges = dict.fromkeys((source, target) for source, target in ends if source != target)
    return replace(flow, nodes=tuple(boxes.get(n, flow.nodes[n]) for n in shown), edges=tuple(edges))


def _parts(graph: nx.DiGraph, kept: set[int]) -> list[list[int]]:
    """Return the nodes of each part to fold, in order."""
    order = list(nx.topological_sort(graph))
    above = _reachable(order, graph.pred, kept)
    below = _reachable(reversed(order), graph.succ, kept)
    alike = nx.Graph()
    alike.add_nodes_from(number for number in order if number not in kept)
    alike.add_edges_from(
        (a, b)
        for a, b in graph.edges
        if a not in kept and b not in kept and (above[a], below[a]) == (above[b], below[b])
    )
    parts = (sorted(part) for part in nx.connected_components(alike))
    return [part for part in parts if len(part) >= _FEWEST]


def _reachable(order: Iterable[int], beside: nx.classes.coreviews.AdjacencyView, kept: set[int]) -> dict[int, int]:
    """Return node → the kept nodes before it in ``order``, as bits."""
    found: dict[int, int] = {}
    for number in order:
        found[number] = 0
        for other in beside[number]:
            found[number] |= found[other] | (1 << other if other in kept else 0)
    return found


def _box(nodes: Sequence[Node]) -> Node:
    titles = Counter(node.title for node in nodes)
    lines = [title if count == 1 else f"{title} ×{count}" for title, count in titles.items()]
    if len(lines) > _LONGEST_TIP:
        lines = [*lines[:_LONGEST_TIP], "…"]
    what = counted(len(nodes), "node")
    return Node(nodes[0].name, "folded", f"{what} unchanged", (), (f"{what} without a change:", *lines))
