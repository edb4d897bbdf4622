"""Entries of dicts, attributes among them, that one run of a model set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MISSING = object()
"""In place of the value of an entry that is not there."""


@dataclass(frozen=True, eq=False)
class Entry:
    """An entry that a run set, added or removed.

    Attributes:
        table: the dict; of an object, its ``__dict__``.
        key: of the entry.
        before: its value before the run, or :data:`MISSING`.
        after: its value after it, likewise.
    """

    table: dict[Any, Any]
    key: Any
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        """Set the entry to ``value``, or remove it."""
        if value is MISSING:
            del self.table[self.key]
        else:
            self.table[self.key] = value
