"""Results of rules in modules, and their grouping for a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from schedule.util.internal_errors import InternalError

Status = Literal["internal error", "applied", "skipped", "declined", "near miss"]
STATUSES: tuple[Status, ...] = ("internal error", "applied", "skipped", "declined", "near miss")


@dataclass(frozen=True)
class Entry:
    """Result of one rule in one module.

    Attributes:
        rule: its name, or its family's if the module could not be examined at all; "all rules" if no rule could.
        path: the module; "" is the root.
        status: ``applied``; ``skipped`` if it cannot be applied; ``declined`` if it is not profitable; ``near miss``;
            ``internal error`` if our own code failed.
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

    @staticmethod
    def of(error: InternalError, path: str = "", rule: str = "all rules") -> Entry:
        """Return the entry of an internal error."""
        return Entry(rule, path, "internal error", 1, error.why, error.where)


@dataclass(frozen=True)
class Row:
    """Modules with the same status of a rule for the same reason.

    Attributes:
        rule: the rule.
        status: the status.
        matches: number of matches.
        modules: their paths, merged if they differ only in numbers.
        reason: why it was not applied, "" if it was.
        entries: one for each module.
    """

    rule: str
    status: Status
    matches: int
    modules: str
    reason: str
    entries: Sequence[Entry]


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """Group entries by rule, status and reason: internal errors first, then applied ones, others in their order."""
    groups: dict[tuple[str, Status, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.rule, entry.status, entry.reason), []).append(entry)
    rows = [
        Row(rule, status, sum(e.count for e in alike), paths_of(e.path for e in alike), reason, alike)
        for (rule, status, reason), alike in groups.items()
    ]
    return sorted(rows, key=lambda row: STATUSES.index(row.status))


def paths_of(paths: Iterable[str]) -> str:
    """Format paths, with those differing only in numbers merged, such as ``h.*.mlp (12)``."""
    alike: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", path), []).append(path or "the root")
    return ", ".join(own[0] if len(own) == 1 else f"{path} ({len(own)})" for path, own in alike.items())
