"""Two graphs side by side."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest

from schedule.patterns.canonical import Line

WIDTH = 62
"""Characters of each side."""
_AROUND = 3
_NUMBER = re.compile(r"%(\d+)")

Row = tuple[Line | None, Line | None, bool]
"""An operation of each graph, None where there is none, and whether they differ."""


def side_by_side(left: Sequence[Line], right: Sequence[Line], width: int = WIDTH) -> str:
    """Show two graphs beside each other: what differs and some lines around it, the first difference marked.

    Args:
        left: the lines of one graph.
        right: the lines of the other one.
        width: characters of each side; longer lines are wrapped.
    """
    rows = list(_rows(left, right))
    different = [index for index, row in enumerate(rows) if row[2]]
    first = different[0] if different else -1
    shown = {near for index in different for near in range(index - _AROUND, index + _AROUND + 1)}
    text = list[str]()
    left_out = False
    for index, (one, other, differs) in enumerate(rows):
        if index not in shown:
            left_out = True
            continue
        if left_out and text:
            text.append("    …")
        left_out = False
        mark = ">>> " if index == first else "  ! " if differs else "    "
        text += _cells(mark, one, other, width)
    if different:
        one, other, _ = rows[first]
        sources = [line.source for line in (one, other) if line is not None and line.source]
        where = f" at {' and '.join(dict.fromkeys(sources))}" if sources else ""
        text.append(f"first difference (>>>){where}")
    return "\n".join(text)


def _rows(left: Sequence[Line], right: Sequence[Line]) -> Iterator[Row]:
    """Align two graphs; operations are the same if their operands are."""
    names: dict[str, str] = {}  # of values: left to right
    plain = [[_NUMBER.sub("%", line.text) for line in lines] for lines in (left, right)]
    for kind, a, b, c, d in SequenceMatcher(None, plain[0], plain[1], autojunk=False).get_opcodes():
        for one, other in zip_longest(left[a:b], right[c:d]):
            if one is None or other is None:
                yield one, other, True
                continue
            mine, theirs = _NUMBER.findall(one.text), _NUMBER.findall(other.text)
            if one.text.startswith("%") and other.text.startswith("%"):  # results of different ones too: show it once
                names.setdefault(mine[0], theirs[0])
            yield one, other, kind != "equal" or [names.get(each) for each in mine] != theirs


def _cells(mark: str, one: Line | None, other: Line | None, width: int) -> Iterator[str]:
    cells = [textwrap.wrap(line.text, width, subsequent_indent="    ") if line else ["—"] for line in (one, other)]
    for row, (left, right) in enumerate(zip_longest(*cells, fillvalue="")):
        yield f"{mark if row == 0 else ' ' * len(mark)}{left:<{width}} | {right}".rstrip()
