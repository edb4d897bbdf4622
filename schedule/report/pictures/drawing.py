"""Drawing of graphs as SVG, with a module's graphs before and after as one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from markupsafe import Markup

from schedule.report.pictures.flow import Flow, Node
from schedule.report.pictures.folded_parts import folded
from schedule.report.pictures.graphviz import lay_out
from schedule.report.pictures.picture_layout import Box, Layout, Point
from schedule.util.templating import rendered

COLORS = 8

_TITLE, _LINE, _PADDING = 7.4, 6.5, 10.0
_FIRST, _NEXT = 15.0, 14.0


class Palette:
    """Colors of a page, the same for a rule or primitive in every picture."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, rule: str) -> int:
        """Return the color number of a rule, repeating after :data:`COLORS` rules."""
        return self._known.setdefault(rule, len(self._known)) % COLORS


@dataclass(frozen=True)
class Change:
    """One rewritten match.

    Attributes:
        rule: the rule or primitive.
        number: of the change in this module, from 1.
    """

    rule: str
    number: int


@dataclass(frozen=True)
class Side:
    """One graph of a picture.

    Attributes:
        caption: such as ``before``.
        flow: the nodes and edges to draw.
        changes: name of a node → the change that removed or added it.
        calls: path of a called module → the primitive applied to it.
    """

    caption: str
    flow: Flow
    changes: Mapping[str, Change]
    calls: Mapping[str, str]


@dataclass(frozen=True)
class Drawn:
    """One graph, ready for display.

    Attributes:
        caption: such as ``before``.
        drawing: the graph, with what is far from its changes folded.
        whole: the graph without folding; None if nothing is folded.
        text: each line of the graph, with the color number of a changed one.
    """

    caption: str
    drawing: Markup
    whole: Markup | None
    text: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Picture:
    """A module's graph, or its graphs before and after, ready for display.

    Attributes:
        sides: each graph.
        legend: (number of the color, rule, numbers of its changes).
    """

    sides: tuple[Drawn, ...]
    legend: tuple[tuple[int, str, tuple[int, ...]], ...]

    @property
    def interest(self) -> tuple[int, int]:
        """Sort key for the picture shown first: before and after graphs, then the number of rules."""
        return len(self.sides), len(self.legend)


def picture(sides: tuple[Side, ...], palette: Palette) -> Picture:
    """Draw ``sides`` with one legend."""
    numbers: dict[str, dict[int, None]] = {}
    for side in sides:
        for change in side.changes.values():
            numbers.setdefault(change.rule, {})[change.number] = None
        for rule in side.calls.values():
            numbers.setdefault(rule, {})
    legend = tuple((palette.of(rule), rule, tuple(sorted(of_rule))) for rule, of_rule in numbers.items())
    return Picture(tuple(_drawn(side, palette) for side in sides), legend)


def _drawn(side: Side, palette: Palette) -> Drawn:
    called = {node.name for node in side.flow.nodes if node.path in side.calls}
    part = replace(side, flow=folded(side.flow, called.union(side.changes)))
    whole = None if part.flow is side.flow else _svg(side, palette)
    return Drawn(side.caption, _svg(part, palette), whole, _text(side, palette))


def _text(side: Side, palette: Palette) -> tuple[tuple[str, int | None], ...]:
    """Return the lines of the graph, with the color number of changed ones."""
    changes = [side.changes.get(name) for name in side.flow.names]
    colors = [None if change is None else palette.of(change.rule) for change in changes]
    return tuple(zip(side.flow.text, colors, strict=True))


def _svg(side: Side, palette: Palette) -> Markup:
    boxes = [box_of(node) for node in side.flow.nodes]
    layout = lay_out(boxes, side.flow.edges)
    shapes = []
    for node, box, center in zip(side.flow.nodes, boxes, layout.centers, strict=True):
        change = side.changes.get(node.name)
        rule = change.rule if change is not None else side.calls.get(node.path) if node.kind == "call" else None
        shapes.append(
            {
                "node": node,
                "box": box,
                "left": center[0] - box.width / 2,
                "top": center[1] - box.height / 2,
                "change": change,
                "color": None if rule is None else palette.of(rule),
                "tip": "\n".join(node.tip if rule is None else (*node.tip, rule)),
            }
        )
    return rendered(
        "graph.html", layout=layout, shapes=shapes, edges=_paths(layout), side=side, first=_FIRST, next=_NEXT
    )


def box_of(node: Node) -> Box:
    """Return the box for a node's text."""
    longest = max(_TITLE * len(node.title), *(_LINE * len(line) for line in node.lines), 40.0)
    return Box(round(longest + 2 * _PADDING), 12.0 + _NEXT * (1 + len(node.lines)))


def _paths(layout: Layout) -> list[tuple[str, str]]:
    """Return the line and the arrow head of each edge."""
    found = []
    for points in layout.edges:
        curves = [points[i : i + 3] for i in range(1, len(points), 3)]
        line = f"M{_at(points[0])}" + "".join(f"C{' '.join(map(_at, curve))}" for curve in curves)
        found.append((line, _head(points[-2], points[-1])))
    return found


def _head(before: Point, end: Point) -> str:
    """Return an arrow head at ``end`` for a line from ``before``."""
    x, y = end[0] - before[0], end[1] - before[1]
    length = math.hypot(x, y)
    x, y = (x / length, y / length) if length else (0.0, 1.0)
    foot, wide = (end[0] - 6 * x, end[1] - 6 * y), (3.5 * y, -3.5 * x)
    left, right = (foot[0] - wide[0], foot[1] - wide[1]), (foot[0] + wide[0], foot[1] + wide[1])
    return f"M{_at(left)}L{_at(right)}L{_at(end)}Z"


def _at(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"
