"""Layouts by graphviz, if its ``dot`` is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

from schedule.report.pictures.picture_layout import MARGIN, Box, Layout, Point, layered

SECONDS = 10.0
_POINTS = 72.0


def lay_out(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out by graphviz if it is installed and takes no longer than 10 s, else by :func:`.layered`."""
    dot = _dot()
    if dot is None or not boxes:
        return layered(boxes, edges)
    try:
        done = subprocess.run(
            [dot, "-Tplain"], input=script(boxes, edges), capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError):  # broken or too slow: treated as not installed
        return layered(boxes, edges)
    return read_plain(done.stdout, len(boxes), edges)


@cache
def _dot() -> str | None:
    return shutil.which("dot")


def script(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> str:
    """Return the graph in the DOT language, with numbers as names to avoid quoting."""
    lines = ["digraph {", "graph [nodesep=0.22 ranksep=0.4]", "node [shape=box fixedsize=true]", "edge [dir=none]"]
    for number, box in enumerate(boxes):
        lines.append(f"n{number} [width={box.width / _POINTS:.4f} height={box.height / _POINTS:.4f}]")
    lines += [f"n{source} -> n{target}" for source, target in edges]
    return "\n".join([*lines, "}"])


def read_plain(text: str, count: int, edges: Sequence[tuple[int, int]]) -> Layout:
    """Read the layout of ``count`` boxes from the output of ``dot -Tplain``, in inches from the bottom left."""
    width = height = 0.0
    centers: dict[int, Point] = {}
    routes: dict[tuple[int, int], tuple[Point, ...]] = {}

    def point(x: str, y: str) -> Point:
        return MARGIN + float(x) * _POINTS, MARGIN + (height - float(y)) * _POINTS

    for line in text.replace("\\\n", "").splitlines():
        kind, *words = line.split()
        if kind == "graph":
            width, height = float(words[1]), float(words[2])
        elif kind == "node":
            centers[int(words[0][1:])] = point(words[1], words[2])
        elif kind == "edge":
            numbers = words[3 : 3 + 2 * int(words[2])]
            points = tuple(point(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True))
            routes[int(words[0][1:]), int(words[1][1:])] = points
    size = 2 * MARGIN + width * _POINTS, 2 * MARGIN + height * _POINTS
    return Layout(*size, tuple(centers[n] for n in range(count)), tuple(routes[edge] for edge in edges))
