"""The file of results: lines of JSON, appended by several processes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 200_000
"""Size that the file stays below."""
_RESERVE = 20_000
"""Bytes that only the outcomes of items may use, so none is missing because results filled the file."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Log:
    """The file of results, or the view of one item on it."""

    path: Path
    item: str = ""

    def start(self, record: Record) -> None:
        """Begin the file anew."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"kind": "start", **record}) + "\n")

    def of(self, item: str) -> Log:
        """Return the view of an item."""
        return Log(self.path, item)

    def result(self, **values: Any) -> None:
        """Append a result of this item, unless the file is full."""
        self._append({"kind": "result", "item": self.item, **values}, MOST_BYTES - _RESERVE)

    def outcome(self, status: str, seconds: float, error: str = "") -> None:
        """Append how this item ended."""
        said = {"error": error} if error else {}
        self._append({"kind": "item", "item": self.item, "status": status, "seconds": round(seconds, 1), **said})

    def read(self) -> list[Record]:
        """Return all records, without a last line that was cut off."""
        lines = self.path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def _append(self, record: Record, most: int = MOST_BYTES) -> None:
        line = (json.dumps(record) + "\n").encode()
        # One write to a file opened for appending: lines of several processes do not mix.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.fstat(file).st_size + len(line) <= most:
                os.write(file, line)
                os.fsync(file)
        finally:
            os.close(file)
