"""Results of rules in modules, and their grouping for a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["applied", "skipped", "declined", "near miss"]
STATUSES: tuple[Status, ...] = ("applied", "skipped", "declined", "near miss")


@dataclass(frozen=True)
class Entry:
    """Result of one rule in one module.

    Attributes:
        rule: its name, or its family's if the module could not be examined at all.
        path: the module; "" is the root.
        status: ``applied``; ``skipped`` if it cannot be applied; ``declined`` if it is not profitable; ``near miss``.
        count: number of matches.
        reason: why it was not applied, "" if it was.
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
    """Modules with the same status of a rule for the same reason.

    Attributes:
        status: the status.
        places: number of matches.
        modules: their paths, merged if they differ only in numbers.
        reason: why it was not applied, "" if it was.
        entries: one for each module.
    """

    status: str
    matches: int
    modules: str
    reason: str
    entries: Sequence[Entry]


def grouped(entries: Iterable[Entry]) -> dict[tuple[str, str, str], list[Entry]]:
    """Group entries by rule, status and reason, applied ones first."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.rule, entry.status, entry.reason), []).append(entry)
    order = {status: position for position, status in enumerate(STATUSES)}
    return dict(sorted(groups.items(), key=lambda item: order[item[0][1]]))  # type: ignore[index]


def rows_of(entries: Sequence[Entry]) -> dict[str, list[Row]]:
    """Return rule → its rows, with applied rules first."""
    rules: dict[str, list[Row]] = {}
    for (rule, status, reason), alike in grouped(entries).items():
        matches, modules = sum(entry.count for entry in alike), paths_of(entry.path for entry in alike)
        rules.setdefault(rule, []).append(Row(status, matches, modules, reason, alike))
    return rules


def paths_of(paths: Iterable[str]) -> str:
    """Format paths, with those differing only in numbers merged, such as ``h.*.mlp (12)``."""
    alike: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path), []).append(path or "the root")
    return ", ".join(own[0] if len(own) == 1 else f"{path} ({len(own)})" for path, own in alike.items())
