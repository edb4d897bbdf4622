"""Docstrings as Markdown: sections, literal blocks, tables and roles, as this project writes them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ITEM = re.compile(r"(?P<name>[\w*][\w.*, ]*): (?P<text>.*)")
_BORDER = re.compile(r"=+( +=+)+")
_PICTURE = re.compile(r"^\s*((before|after|flatten=\w+):|→)|  →  ", re.MULTILINE)


def markdown(docstring: str) -> str:
    """``docstring`` as Markdown. Literal blocks are Python, unless they draw what is before and what is after."""
    return "\n".join(_converted(docstring.splitlines())).strip() + "\n"


def documented(value: Any) -> str:
    """The docstring of ``value`` as Markdown."""
    return markdown(inspect.getdoc(value) or "")


def signature(name: str, function: Callable[..., Any], leave_out: Sequence[str] = ()) -> str:
    """How ``function`` is called, in one highlighted line."""
    found = inspect.signature(function)
    kept = [
        parameter.replace(annotation=_written(parameter.annotation))
        for parameter in found.parameters.values()
        if parameter.name not in leave_out
    ]
    text = found.replace(parameters=kept, return_annotation=_written(found.return_annotation))
    return f"`#!python {name}{text}`\n"


class _Written(str):
    """An annotation that is shown as it was written."""

    def __repr__(self) -> str:
        return str(self)


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def _converted(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if _SECTION.fullmatch(line):
            below, at = _indented(lines, at)
            yield from ["", f"**{line}**", "", *_items(below, line), ""]
        elif line.rstrip().endswith("::"):
            below, at = _indented(lines, at)
            yield from [_before_block(line), "", *_fence(below), ""]
        elif _BORDER.fullmatch(line):
            at, table = _table(lines, at)
            yield from ["", *table, ""]
        else:
            yield inline(line)
            at += 1


def _indented(lines: list[str], at: int) -> tuple[list[str], int]:
    """What is indented below line ``at``, dedented, and where it ends."""
    margin, end = _margin(lines[at]), at + 1
    while end < len(lines) and (not lines[end].strip() or _margin(lines[end]) > margin):
        end += 1
    return textwrap.dedent("\n".join(lines[at + 1 : end])).strip("\n").splitlines(), end


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip())


def _before_block(line: str) -> str:
    text = line.rstrip().removesuffix("::")
    return inline(text.rstrip() + ("" if text.endswith(" ") else ":")) if text.strip() else ""


def _fence(lines: list[str]) -> list[str]:
    language = "text" if _PICTURE.search("\n".join(lines)) else "python"
    return [f"```{language}", *lines, "```"]


def _items(lines: list[str], section: str) -> Iterator[str]:
    """The entries of a section as a list; of Returns and Yields, which have none, the text."""
    if section in ("Returns:", "Yields:"):
        yield from _converted(lines)
        return
    for line in lines:
        item = _ITEM.fullmatch(line)
        if item:
            names = ", ".join(f"`{name.strip()}`" for name in item["name"].split(","))
            yield f"- {names}: {inline(item['text'])}"
        else:
            yield f"    {inline(line.strip())}" if line.strip() else ""


def _table(lines: list[str], at: int) -> tuple[int, list[str]]:
    """The table that begins at line ``at`` as Markdown, and where it ends."""
    columns = [match.span() for match in re.finditer(r"=+", lines[at])]
    columns[-1] = (columns[-1][0], 10_000)
    borders = [at]
    end = at + 1
    while lines[end].strip():
        if _BORDER.fullmatch(lines[end]):
            borders.append(end)
        end += 1
        if end == len(lines):
            break
    rows = [[inline(lines[n][slice(*span)].strip()) for span in columns] for n in range(at, end) if n not in borders]
    if len(borders) == 2:  # no head
        rows.insert(0, [""] * len(columns))
    return end, as_table(rows)


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as a Markdown table, the first one its head."""
    written = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [written[0], "|" + "---|" * len(rows[0]), *written[1:]]


def inline(line: str) -> str:
    """Roles and literals of reStructuredText within a line."""
    line = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", line)
    return re.sub(r"``([^`]+)``", r"`\1`", line)
