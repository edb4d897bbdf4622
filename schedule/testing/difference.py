"""Two graphs side by side."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest

from schedule.patterns.canonical import Line

WIDTH = 62
"""Characters of each side."""
_AROUND = 3
_NUMBER = re.compile(r"%\d+")

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
    """Align two graphs; an operation differs if the other graph has no such one, though it has its operands."""
    digests = [_digests(lines) for lines in (left, right)]
    known = [set(each.values()) for each in digests]
    new = [_new(left, digests[0], known[1]), _new(right, digests[1], known[0])]
    plain = [[_NUMBER.sub("%", line.text) for line in lines] for lines in (left, right)]
    for _, a, b, c, d in SequenceMatcher(None, plain[0], plain[1], autojunk=False).get_opcodes():
        for one, other in _paired(left[a:b], right[c:d], new):
            yield one, other, one in new[0] or other in new[1]


def _paired(
    left: Sequence[Line], right: Sequence[Line], new: Sequence[set[Line]]
) -> Iterator[tuple[Line | None, Line | None]]:
    """Pair the lines of two parts in order, new ones with new ones."""
    ones, others = list(left), list(right)
    while ones and others:
        is_new, is_other_new = ones[0] in new[0], others[0] in new[1]
        yield (None if is_other_new < is_new else ones.pop(0)), (None if is_new < is_other_new else others.pop(0))
    yield from zip_longest(ones, others)


def _digests(lines: Sequence[Line]) -> dict[str, str]:
    """Return the name of each result, such as ``%3``, → a digest of all that it is computed from.

    Results of several such operations, as of two dropouts of one input, are told apart by their order.
    """
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for line in lines:
        name, _, operation = line.text.partition(" = ") if line.text.startswith("%") else ("return", "", line.text)
        text = _NUMBER.sub(lambda match: found.get(match[0], match[0]), operation)
        found[name] = hashlib.sha256(f"{seen[text]} {text}".encode()).hexdigest()
        seen[text] += 1
    return found


def _new(lines: Sequence[Line], digests: dict[str, str], known: set[str]) -> set[Line]:
    """Return the lines whose results are not ``known``, but whose operands are."""
    found = set()
    for (name, digest), line in zip(digests.items(), lines, strict=True):
        operands = set(_NUMBER.findall(line.text)) - {name}
        if digest not in known and all(digests.get(each) in known for each in operands):
            found.add(line)
    return found


def _cells(mark: str, one: Line | None, other: Line | None, width: int) -> Iterator[str]:
    cells = [textwrap.wrap(line.text, width, subsequent_indent="    ") if line else ["—"] for line in (one, other)]
    for row, (left, right) in enumerate(zip_longest(*cells, fillvalue="")):
        yield f"{mark if row == 0 else ' ' * len(mark)}{left:<{width}} | {right}".rstrip()
