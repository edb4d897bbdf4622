"""Where boxes and edges go: nothing overlaps, all goes down, and the same graph looks the same."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedule.report.pictures import graphviz
from schedule.report.pictures.graphviz import lay_out, read_plain, script
from schedule.report.pictures.picture_layout import Box, Layout, Point, layered

Graph = tuple[list[Box], list[tuple[int, int]]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Up to 24 boxes; edges go from lower to higher numbers, after a shuffle."""
    count = draw(st.integers(1, 24))
    names = draw(st.permutations(range(count)))
    sizes = st.builds(Box, st.integers(40, 240).map(float), st.integers(26, 54).map(float))
    boxes = draw(st.lists(sizes, min_size=count, max_size=count))
    pairs = [(names[i], names[j]) for i, j in itertools.combinations(range(count), 2)]
    return boxes, draw(st.lists(st.sampled_from(pairs), unique=True, max_size=40)) if pairs else []


def sides(layout: Layout, boxes: Sequence[Box], number: int) -> tuple[float, float, float, float]:
    x, y = layout.centers[number]
    return (
        x - boxes[number].width / 2,
        x + boxes[number].width / 2,
        y - boxes[number].height / 2,
        y + boxes[number].height / 2,
    )


def overlaps(layout: Layout, boxes: Sequence[Box]) -> list[tuple[int, int]]:
    found = []
    for a, b in itertools.combinations(range(len(boxes)), 2):
        left, right, top, bottom = sides(layout, boxes, a)
        other = sides(layout, boxes, b)
        if left < other[1] and other[0] < right and top < other[3] and other[2] < bottom:
            found.append((a, b))
    return found


def along(route: Sequence[Point]) -> list[Point]:
    """Points of a row of cubic curves."""
    points = []
    for i in range(0, len(route) - 1, 3):
        a, b, c, d = route[i : i + 4]
        for t in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            points.append(tuple(sum(w * p[k] for w, p in zip(weights, (a, b, c, d), strict=True)) for k in (0, 1)))
    return points  # type: ignore[return-value]


@given(graphs())
@settings(max_examples=40)
def test_boxes_do_not_overlap_and_are_inside(graph: Graph) -> None:
    boxes, edges = graph
    layout = layered(boxes, edges)
    assert not overlaps(layout, boxes)
    for number in range(len(boxes)):
        left, right, top, bottom = sides(layout, boxes, number)
        assert left >= 0 and right <= layout.width and top >= 0 and bottom <= layout.height


@given(graphs())
@settings(max_examples=40)
def test_edges_go_down_end_at_their_box_and_cross_none(graph: Graph) -> None:
    boxes, edges = graph
    layout = layered(boxes, edges)
    for (source, target), route in zip(edges, layout.edges, strict=True):
        assert layout.centers[source][1] < layout.centers[target][1]
        heights = [y for _, y in along(route)]
        assert all(a <= b + 1e-6 for a, b in itertools.pairwise(heights))
        left, right, top, _ = sides(layout, boxes, target)
        assert left < route[-1][0] < right and route[-1][1] == pytest.approx(top)
        for number in set(range(len(boxes))) - {source, target}:
            left, right, top, bottom = sides(layout, boxes, number)
            assert not any(left < x < right and top < y < bottom for x, y in along(route))


@given(graphs())
@settings(max_examples=20)
def test_every_edge_can_be_followed_from_its_source(graph: Graph) -> None:
    boxes, edges = graph
    layout = layered(boxes, edges)
    for (source, _), route in zip(edges, layout.edges, strict=True):
        x, y = layout.centers[source]
        own = [other for (start, _), other in zip(edges, layout.edges, strict=True) if start == source]
        begins = route[0] == (x, y + boxes[source].height / 2)
        assert begins or any(route[0] in other[:-1] for other in own if other is not route)


@given(graphs())
@settings(max_examples=20)
def test_the_same_graph_looks_the_same(graph: Graph) -> None:
    assert layered(*graph) == layered(*graph)


def test_a_chain_is_straight_and_a_diamond_does_not_cross() -> None:
    boxes = [Box(100, 40)] * 6
    chain = layered(boxes, [(i, i + 1) for i in range(5)])
    assert len({round(x, 6) for x, _ in chain.centers}) == 1
    crossed = layered(boxes, [(0, 2), (0, 3), (1, 4), (1, 5)])
    order = [crossed.centers[n][0] for n in (2, 3, 4, 5)]
    assert max(order[:2]) < min(order[2:]) or max(order[2:]) < min(order[:2])


def test_a_late_input_is_beside_what_uses_it() -> None:
    boxes = [Box(100, 40)] * 5
    layout = layered(boxes, [(0, 1), (1, 2), (2, 3), (4, 3)])
    assert layout.centers[4][1] == layout.centers[2][1]


def test_nothing_is_laid_out_too() -> None:
    assert layered([], []).centers == () and lay_out([], []).centers == ()


# -- graphviz -------------------------------------------------------------------------------------------------

PLAIN = """graph 1 1.5 2
node n0 0.75 1.75 1.5 0.5 "" solid box black lightgrey
node n1 0.75 0.25 1.5 0.5 "" solid box black lightgrey
edge n0 n1 4 0.75 1.5 0.75 1.2 0.75 0.8 \\
0.75 0.5 solid black
stop
"""


def test_what_dot_prints_is_read_from_the_top_left() -> None:
    layout = read_plain(PLAIN, 2, [(0, 1)])
    assert layout.centers[0] == pytest.approx((62, 26)) and layout.centers[1] == pytest.approx((62, 134))
    assert layout.edges[0][0] == pytest.approx((62, 44)) and layout.edges[0][-1] == pytest.approx((62, 116))
    assert (layout.width, layout.height) == pytest.approx((124, 160))


def test_dot_gets_numbers_only() -> None:
    text = script([Box(72, 36), Box(144, 36)], [(0, 1)])
    assert "n1 [width=2.0000 height=0.5000]" in text and "n0 -> n1" in text and '"' not in text


@pytest.mark.parametrize("program", ["exit 1", "sleep 5", "echo nonsense; exit 3"])
def test_a_dot_that_is_broken_or_slow_is_as_good_as_none(
    program: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = f"{tmp_path}/dot"
    with open(broken, "w") as file:
        file.write(f"#!/bin/sh\nexec sh -c '{program}'\n")
    os.chmod(broken, 0o755)
    monkeypatch.setattr(graphviz, "_dot", lambda: broken)
    monkeypatch.setattr(graphviz, "SECONDS", 0.2)
    boxes, edges = [Box(100, 40)] * 2, [(0, 1)]
    assert lay_out(boxes, edges) == layered(boxes, edges)


@pytest.mark.skipif(shutil.which("dot") is None, reason="no graphviz here: apt-get install graphviz")
def test_graphviz_lays_out_without_overlaps() -> None:
    boxes, edges = (
        [Box(100.0 + n, 40) for n in range(8)],
        [(0, 1), (0, 2), (1, 3), (2, 3), (0, 7), (3, 7), (4, 5), (5, 6)],
    )
    layout = lay_out(boxes, edges)
    assert not overlaps(layout, boxes) and len(layout.edges) == len(edges)
    for source, target in edges:
        assert layout.centers[source][1] < layout.centers[target][1]
