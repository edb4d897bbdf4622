"""The code of a page: its blocks, what stands in for names that it does not make, and what is not run, with the reason.

A page says both in comments, which are not shown::

    <!-- setup
    model, batch = tiny_gpt2()
    -->

    <!-- not run: needs two CUDA devices -->
    ```python
    ...
    ```

``<!-- setup replace_all`` is for the code under the heading ``replace_all``, which may be further down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

RUN = ("python", "console")
SHOWN = ("text", "py", "json", "yaml")

_FENCE = re.compile(r"(?P<margin> *)```(?P<language>\S*)$")
_SETUP = re.compile(r"<!-- setup(?: (?P<heading>\S+))?")
_HEADING = re.compile(r"#+ (?P<heading>.+)")
_INDENTED = re.compile(r" {4,}\S")
_HOLDS_INDENTED = re.compile(r"( *([-*]|\d+\.) )|[?!]{3}")
_NOT_RUN = re.compile(r" *<!-- not run: (?P<reason>.+) -->$")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: of :data:`RUN` or :data:`SHOWN`; ``"python"`` for a setup.
        text: its lines.
        line: where the text begins.
        not_run: why it is not run; "" if it is.
    """

    language: str
    text: str
    line: int
    not_run: str = ""


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, setups included, in order.

    Raises:
        ValueError: a block is of a language that is neither run nor known to be only shown, or does not end; code is
            only indented; a setup is for a heading that does not come.
    """
    lines, at, reason = page.splitlines(), 0, ""
    later: dict[str, Block] = {}
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        setup, heading, not_run = (kind.fullmatch(lines[at]) for kind in (_SETUP, _HEADING, _NOT_RUN))
        if setup:
            end = lines.index("-->", at)
            block = Block("python", "\n".join(lines[at + 1 : end]), at + 2)
            if setup["heading"]:
                later[setup["heading"]] = block
            else:
                yield block
            at = end
        elif heading and heading["heading"] in later:
            yield later.pop(heading["heading"])
        elif fence:
            end = _end(lines, at, fence["margin"])
            if fence["language"] not in RUN + SHOWN:
                raise ValueError(f"line {at + 1}: a block is {' or '.join(RUN)}, or is shown as {', '.join(SHOWN)}")
            text = "\n".join(line.removeprefix(fence["margin"]) for line in lines[at + 1 : end])
            yield Block(fence["language"], text, at + 2, reason)
            at, reason = end, ""
        elif not_run:
            reason = not_run["reason"]
        elif _is_code(lines, at):
            raise ValueError(f"line {at + 1}: code is put between ``` and ```, with its language")
        at += 1
    if later:
        raise ValueError(f"setups for headings that there are not: {', '.join(later)}")


def _is_code(lines: list[str], at: int) -> bool:
    """Whether a line would be shown as code because it is indented, and not as part of a list or a note."""
    if not _INDENTED.match(lines[at]) or (at and lines[at - 1].strip()):
        return False
    before = next((line for line in reversed(lines[:at]) if line.strip() and not _INDENTED.match(line)), "")
    return not _HOLDS_INDENTED.match(before)


def _end(lines: list[str], at: int, margin: str) -> int:
    for end in range(at + 1, len(lines)):
        if lines[end].rstrip() == f"{margin}```":
            return end
    raise ValueError(f"line {at + 1}: a block that does not end")


def commands(block: Block) -> list[str]:
    """The command lines of a console block: comments and outputs left out, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", block.text)
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in text.splitlines() if line.startswith("$ ")]
