"""Entries of dicts, including attributes, set by one run of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MISSING = object()
"""Marker for the value of a missing entry."""


@dataclass(frozen=True, eq=False)
class Entry:
    """Dict entry set, added or removed by a run.

    Attributes:
        table: the dict; for an attribute, the ``__dict__`` of the object.
        key: the key of the entry.
        before: its value before the run, or :data:`MISSING`.
        after: its value after the run, or :data:`MISSING`.
    """

    table: dict[Any, Any]
    key: Any
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        """Set the entry to ``value``, or remove it."""
        if value is MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value
