"""Layout of a graph in layers from top to bottom, with few crossings and no overlaps.

Sugiyama's method: layers by the longest path from the inputs, order in a layer by barycenters, then positions that
align neighbors vertically. Edges bend only between layers; inside a layer they have a separate lane, so that no edge
crosses a box.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

GAP, BETWEEN, LANE, MARGIN = 16.0, 30.0, 10.0, 8.0
_SWEEPS = 8

Point = tuple[float, float]
Vertex = tuple[int, int]
"""(node, 0) is a node; (node, layer) is the lane for the node's outgoing edges through that layer."""


@dataclass(frozen=True)
class Box:
    """Size of a node's box, in pixels."""

    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """Positions of boxes and edges, in pixels from the top left.

    Attributes:
        width: total width.
        height: total height.
        centers: center of each box.
        edges: each a sequence of cubic Bézier curves: start, then two control points and an end for each curve. An edge
            that shares a lane with another may start at the point where they separate.
    """

    width: float
    height: float
    centers: tuple[Point, ...]
    edges: tuple[tuple[Point, ...], ...]


def layered(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes with edges between them, deterministically.

    Args:
        boxes: one for each node.
        edges: (from, to), numbers of nodes, without cycles; drawn from top to bottom.
    """
    if not boxes:
        return Layout(2 * MARGIN, 2 * MARGIN, (), ())
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(boxes)))
    graph.add_edges_from(edges)
    layer = _layers(graph)
    rows, links = _with_lanes(graph, layer)
    _order(rows, links)
    x = _across(rows, links, boxes)
    tops, heights = _down(rows, boxes)
    left = min(x[v] - _width(v, boxes) / 2 for row in rows for v in row) - MARGIN
    x = {vertex: at - left for vertex, at in x.items()}
    width = max(x[v] + _width(v, boxes) / 2 for row in rows for v in row) + MARGIN
    centers = tuple((x[(n, 0)], tops[layer[n]] + heights[layer[n]] / 2) for n in range(len(boxes)))
    routes = _routes(edges, layer, x, tops, heights, centers, boxes)
    return Layout(width, tops[-1] + heights[-1] + MARGIN, centers, routes)


def _layers(graph: nx.DiGraph) -> dict[int, int]:
    """Return node → layer: as high as its inputs allow, then lowered to its users if edges get shorter."""
    layer: dict[int, int] = {}
    for number, generation in enumerate(nx.topological_generations(graph)):
        layer |= dict.fromkeys(sorted(generation), number)
    for node in reversed(list(nx.lexicographical_topological_sort(graph))):
        users = list(graph.successors(node))
        if users and graph.in_degree(node) < max(graph.out_degree(node), 1):
            layer[node] = min(layer[user] for user in users) - 1
    first = min(layer.values())
    return {node: at - first for node, at in layer.items()}


class _Links:
    """Links between vertices of neighboring layers."""

    def __init__(self) -> None:
        self.above: dict[Vertex, list[Vertex]] = {}
        self.below: dict[Vertex, list[Vertex]] = {}

    def add(self, upper: Vertex, lower: Vertex) -> None:
        if lower not in self.below.setdefault(upper, []):
            self.below[upper].append(lower)
            self.above.setdefault(lower, []).append(upper)


def _with_lanes(graph: nx.DiGraph, layer: Mapping[int, int]) -> tuple[list[list[Vertex]], _Links]:
    """Return the vertices of each layer, with one shared lane per node for its edges, and their links."""
    rows: list[list[Vertex]] = [[] for _ in range(max(layer.values()) + 1)]
    for node in graph:
        rows[layer[node]].append((node, 0))
    links = _Links()
    for node in graph:
        for user in graph.successors(node):
            before: Vertex = (node, 0)
            for between in range(layer[node] + 1, layer[user]):
                lane = (node, between)
                if lane not in rows[between]:
                    rows[between].append(lane)
                links.add(before, lane)
                before = lane
            links.add(before, (user, 0))
    return rows, links


def _order(rows: list[list[Vertex]], links: _Links) -> None:
    """Sort the rows by barycenter sweeps, and keep the order with the fewest crossings."""
    best, fewest = [list(row) for row in rows], _crossings(rows, links)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        beside = links.above if downwards else links.below
        for number in range(1, len(rows)) if downwards else range(len(rows) - 2, -1, -1):
            fixed = rows[number - 1] if downwards else rows[number + 1]
            position = {vertex: i for i, vertex in enumerate(fixed)}
            own = {vertex: i for i, vertex in enumerate(rows[number])}
            wanted = {v: _mean([position[n] for n in beside.get(v, ())], own[v]) for v in own}
            rows[number].sort(key=wanted.__getitem__)
        crossings = _crossings(rows, links)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    rows[:] = best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(rows: Sequence[Sequence[Vertex]], links: _Links) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        position = {vertex: i for i, vertex in enumerate(lower)}
        seen: list[int] = []
        for vertex in upper:
            ends = sorted(position[user] for user in links.below.get(vertex, ()))
            count += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return count


def _width(vertex: Vertex, boxes: Sequence[Box]) -> float:
    node, lane = vertex
    return LANE if lane else boxes[node].width


def _across(rows: Sequence[Sequence[Vertex]], links: _Links, boxes: Sequence[Box]) -> dict[Vertex, float]:
    """Return vertex → x of its center, near the mean of its neighbors, without overlaps in its row."""
    x: dict[Vertex, float] = {}
    for row in rows:
        x |= _apart(row, [0.0] * len(row), [1.0] * len(row), boxes)
    for sweep in range(2 * _SWEEPS):
        last = sweep >= 2 * _SWEEPS - 4
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted, weights = [], []
            for vertex in row:
                above, below = links.above.get(vertex, []), links.below.get(vertex, [])
                near = [*above, *below] if last or not above or not below else above if sweep % 2 == 0 else below
                wanted.append(_mean([x[other] for other in near], x[vertex]))
                weights.append(4.0 if vertex[1] else 1.0 + len(near))  # straight lanes before centered boxes
            x |= _apart(row, wanted, weights, boxes)
    _straighten(rows, x, boxes)
    return x


def _straighten(rows: Sequence[Sequence[Vertex]], x: dict[Vertex, float], boxes: Sequence[Box]) -> None:
    """Align each lane vertically through as many layers as its neighbors leave room for."""
    beside = {
        vertex: (row[:position], row[position + 1 :])
        for row in rows
        for position, vertex in enumerate(row)
        if vertex[1]
    }
    run: list[Vertex] = []
    low, high = -math.inf, math.inf
    for vertex in sorted(beside):
        left, right = beside[vertex]
        least = max((x[v] + _room(v, vertex, boxes) for v in left[-1:]), default=-math.inf)
        most = min((x[v] - _room(v, vertex, boxes) for v in right[:1]), default=math.inf)
        goes_on = bool(run) and run[-1] == (vertex[0], vertex[1] - 1) and max(low, least) <= min(high, most)
        if not goes_on:
            run, low, high = [], -math.inf, math.inf
        run, low, high = [*run, vertex], max(low, least), min(high, most)
        straight = min(max(x[run[0]], low), high)
        x |= dict.fromkeys(run, straight)


def _room(one: Vertex, other: Vertex, boxes: Sequence[Box]) -> float:
    """Return the minimum distance between the centers of two neighbors in a row."""
    return (_width(one, boxes) + _width(other, boxes)) / 2 + (LANE if one[1] and other[1] else GAP)


def _apart(
    row: Sequence[Vertex], wanted: Sequence[float], weights: Sequence[float], boxes: Sequence[Box]
) -> dict[Vertex, float]:
    """Return the positions closest to ``wanted``, by weighted least squares, without overlaps in the row.

    After subtracting the room needed by vertices to the left, positions must not decrease: an isotonic regression, by
    pooling adjacent violators.
    """
    needed, at = [0.0], 0.0
    for left, right in pairwise(row):
        at += _room(left, right, boxes)
        needed.append(at)
    pools: list[tuple[float, float, int]] = []  # position, weight, number of vertices
    for position, weight, room in zip(wanted, weights, needed, strict=False):
        pool = (position - room, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            other = pools.pop()
            total = other[1] + pool[1]
            pool = ((other[0] * other[1] + pool[0] * pool[1]) / total, total, other[2] + pool[2])
        pools.append(pool)
    positions = [position for position, _, count in pools for _ in range(count)]
    return {vertex: position + room for vertex, position, room in zip(row, positions, needed, strict=False)}


def _down(rows: Sequence[Sequence[Vertex]], boxes: Sequence[Box]) -> tuple[list[float], list[float]]:
    """Return the top and the height of each layer."""
    tops, heights, at = [], [], MARGIN
    for row in rows:
        heights.append(max([boxes[node].height for node, lane in row if not lane], default=0.0))
        tops.append(at)
        at += heights[-1] + BETWEEN
    return tops, heights


def _routes(
    edges: Iterable[tuple[int, int]],
    layer: Mapping[int, int],
    x: Mapping[Vertex, float],
    tops: Sequence[float],
    heights: Sequence[float],
    centers: Sequence[Point],
    boxes: Sequence[Box],
) -> tuple[tuple[Point, ...], ...]:
    edges = list(edges)
    coming: dict[int, list[tuple[float, int]]] = {}
    for number, (source, target) in enumerate(edges):
        last = (source, layer[target] - 1) if layer[target] - layer[source] > 1 else (source, 0)
        coming.setdefault(target, []).append((x[last], number))
    routes: dict[int, tuple[Point, ...]] = {}
    drawn: set[int] = set()
    for number, (source, target) in sorted(enumerate(edges), key=lambda item: -layer[item[1][1]]):
        lanes = range(layer[source] + 1, layer[target])
        if source in drawn and lanes:  # a longer edge from this node has drawn the lane already
            points = [(x[(source, lanes[-1])], tops[lanes[-1]] + heights[lanes[-1]])]
        else:
            points = [(centers[source][0], centers[source][1] + boxes[source].height / 2)]
            points += _straight(points[-1], tops[layer[source]] + heights[layer[source]])
            for lane in lanes:
                points += _bend(points[-1], (x[(source, lane)], tops[lane]))
                points += _straight(points[-1], tops[lane] + heights[lane])
        drawn.add(source)
        others = [each for _, each in sorted(coming[target])]
        share = (others.index(number) + 1) / (len(others) + 1) - 0.5
        port = centers[target][0] + share * 0.6 * boxes[target].width
        points += _bend(points[-1], (port, tops[layer[target]]))
        points += _straight(points[-1], centers[target][1] - boxes[target].height / 2)
        routes[number] = tuple(points)
    return tuple(routes[number] for number in range(len(edges)))


def _bend(start: Point, end: Point) -> list[Point]:
    middle = (start[1] + end[1]) / 2
    return [(start[0], middle), (end[0], middle), end]


def _straight(start: Point, y: float) -> list[Point]:
    if y <= start[1]:
        return []
    end = (start[0], y)
    return [start, end, end]
