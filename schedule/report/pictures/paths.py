"""Short forms of module paths."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def ranged(paths: Iterable[str]) -> list[str]:
    """Merge consecutive paths with numbers counting up by one, such as ``h.0.mlp, h.1.mlp`` into ``h.0–1.mlp``."""
    found: list[tuple[str, str]] = []
    for path in paths:
        if found and _follows(found[-1][1], path):
            found[-1] = (found[-1][0], path)
        else:
            found.append((path, path))
    return [_between(first, last) if first != last else first for first, last in found]


def _follows(before: str, path: str) -> bool:
    """Check whether ``path`` is ``before`` with its last number increased by one."""
    last = list(_NUMBER.finditer(before))
    return bool(last) and path == _with(before, last[-1], str(int(last[-1].group()) + 1))


def _between(first: str, last: str) -> str:
    end = list(_NUMBER.finditer(last))[-1].group()
    number = list(_NUMBER.finditer(first))[-1]
    return _with(first, number, f"{number.group()}–{end}")


def _with(path: str, number: re.Match[str], text: str) -> str:
    return path[: number.start()] + text + path[number.end() :]
