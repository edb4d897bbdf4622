"""Steps of a recipe, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedule.recipes.recipe_values import Picked, Value, inner, source, to_json

VERSION = 1
"""Version of the JSON format; newer versions are refused."""


@dataclass(frozen=True)
class Find:
    """Search for matches used by later steps.

    Attributes:
        name: name of the matches in later steps.
        at: the modules: one glob, or paths; "" is the root.
        pattern: the pattern to search for.
        counts: number of matches per module: one number for all, or one for each.
    """

    name: str
    at: tuple[str, ...]
    pattern: Value
    counts: int | tuple[int, ...]

    def json(self) -> dict[str, Any]:
        """Return the JSON data."""
        counts = list(self.counts) if isinstance(self.counts, tuple) else self.counts
        return {"find": self.name, "at": list(self.at), "pattern": to_json(self.pattern), "counts": counts}

    def __str__(self) -> str:
        return f"{self.name} = find({_text(self.pattern)}) in {_paths(self.at)}: {_counted(self.counts)}"


@dataclass(frozen=True)
class Call:
    """Call of a primitive.

    Attributes:
        primitive: its name.
        at: the modules, as for a find.
        arguments: (name of the parameter, value).
        rules: for ``optimize``, the rules with matches; each is one undoable step.
    """

    primitive: str
    at: tuple[str, ...]
    arguments: tuple[tuple[str, Value], ...] = ()
    rules: tuple[str, ...] | None = None

    def json(self) -> dict[str, Any]:
        """Return the JSON data."""
        arguments = {name: to_json(value) for name, value in self.arguments}
        found: dict[str, Any] = {"call": self.primitive, "at": list(self.at), "arguments": arguments}
        return found | ({"rules": list(self.rules)} if self.rules is not None else {})

    @property
    def history_steps(self) -> int:
        """Number of history steps made by the call."""
        return 1 if self.rules is None else len(self.rules)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={_text(value)}" for name, value in self.arguments)
        applied = f": {', '.join(self.rules)}" if self.rules is not None else ""
        return f"{self.primitive}({given}) on {_paths(self.at)}{applied}"


@dataclass(frozen=True)
class Undo:
    """Undo of the last steps of the history.

    Attributes:
        times: number of steps.
    """

    times: int = 1

    def json(self) -> dict[str, Any]:
        """Return the JSON data."""
        return {"undo": self.times}

    def __str__(self) -> str:
        return "undo" if self.times == 1 else f"undo {self.times} times"


Step = Find | Call | Undo


def finds_used(step: Step) -> list[str]:
    """Return the names of the finds with matches used by ``step``."""
    if not isinstance(step, Call):
        return []
    return [value.find for _, given in step.arguments for value in inner(given) if isinstance(value, Picked)]


def _paths(at: tuple[str, ...]) -> str:
    return ", ".join(path or "the root" for path in at)


def _counted(counts: int | tuple[int, ...]) -> str:
    return f"{counts} in each" if isinstance(counts, int) else ", ".join(map(str, counts))


def _text(value: Value) -> str:
    return source(value, set())
