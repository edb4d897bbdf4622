"""What a rule met in a module, and how such entries are put together for a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["applied", "skipped", "declined", "near miss"]
STATUSES: tuple[Status, ...] = ("applied", "skipped", "declined", "near miss")


@dataclass(frozen=True)
class Entry:
    """One rule in one module.

    Attributes:
        rule: its name; that of its family where a module could not be looked into at all.
        path: the module; "" is the root.
        status: ``applied``; ``skipped`` if it cannot be; ``declined`` if it would not pay; ``near miss``.
        count: in how many places.
        reason: why not, "" if applied.
        source: ``file:line`` of the user's code, "" if unknown.
    """

    rule: str
    path: str
    status: Status
    count: int = 1
    reason: str = ""
    source: str = ""


@dataclass(frozen=True)
class Row:
    """Modules in which a rule met the same fate for the same reason.

    Attributes:
        status: that fate.
        places: in how many places.
        modules: their paths, those that differ by numbers only as one.
        reason: why it was not applied, "" if it was.
        entries: one for each module.
    """

    status: str
    places: int
    modules: str
    reason: str
    entries: Sequence[Entry]


def grouped(entries: Iterable[Entry]) -> dict[tuple[str, str, str], list[Entry]]:
    """Entries alike in rule, status and reason together, applied ones first."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.rule, entry.status, entry.reason), []).append(entry)
    order = {status: place for place, status in enumerate(STATUSES)}
    return dict(sorted(groups.items(), key=lambda item: order[item[0][1]]))  # type: ignore[index]


def rows_of(entries: Sequence[Entry]) -> dict[str, list[Row]]:
    """Rule → its rows; rules that were applied first."""
    rules: dict[str, list[Row]] = {}
    for (rule, status, reason), alike in grouped(entries).items():
        places, modules = sum(entry.count for entry in alike), paths_of(entry.path for entry in alike)
        rules.setdefault(rule, []).append(Row(status, places, modules, reason, alike))
    return rules


def paths_of(paths: Iterable[str]) -> str:
    """Paths that differ by numbers only become one: ``h.*.mlp (12)``."""
    alike: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path), []).append(path or "the root")
    return ", ".join(own[0] if len(own) == 1 else f"{path} ({len(own)})" for path, own in alike.items())
