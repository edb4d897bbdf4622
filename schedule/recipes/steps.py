"""The steps of a recipe, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schedule.recipes.values import Picked, Value, inner, source, to_json

VERSION = 1
"""Of the JSON; a larger one is refused."""


@dataclass(frozen=True)
class Find:
    """A search whose matches later steps use.

    Attributes:
        name: by which they do.
        at: the modules: one glob, or paths; "" is the root.
        pattern: what is looked for.
        counts: how many matches each module has: one number for all, or one for each.
    """

    name: str
    at: tuple[str, ...]
    pattern: Value
    counts: int | tuple[int, ...]

    def json(self) -> dict[str, Any]:
        """As JSON."""
        counts = list(self.counts) if isinstance(self.counts, tuple) else self.counts
        return {"find": self.name, "at": list(self.at), "pattern": to_json(self.pattern), "counts": counts}

    def __str__(self) -> str:
        return f"{self.name} = find({_text(self.pattern)}) in {_places(self.at)}: {_counted(self.counts)}"


@dataclass(frozen=True)
class Call:
    """A primitive applied.

    Attributes:
        primitive: its name.
        at: as of a find.
        arguments: (name of the parameter, value).
        rules: of ``optimize``: the rules that found something; each is one undoable step.
    """

    primitive: str
    at: tuple[str, ...]
    arguments: tuple[tuple[str, Value], ...] = ()
    rules: tuple[str, ...] | None = None

    def json(self) -> dict[str, Any]:
        """As JSON."""
        arguments = {name: to_json(value) for name, value in self.arguments}
        found: dict[str, Any] = {"call": self.primitive, "at": list(self.at), "arguments": arguments}
        return found | ({"rules": list(self.rules)} if self.rules is not None else {})

    @property
    def places(self) -> int:
        """How many steps of the history it makes."""
        return 1 if self.rules is None else len(self.rules)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={_text(value)}" for name, value in self.arguments)
        applied = f": {', '.join(self.rules)}" if self.rules is not None else ""
        return f"{self.primitive}({given}) on {_places(self.at)}{applied}"


@dataclass(frozen=True)
class Undo:
    """Steps of the history taken back.

    Attributes:
        times: how many.
    """

    times: int = 1

    def json(self) -> dict[str, Any]:
        """As JSON."""
        return {"undo": self.times}

    def __str__(self) -> str:
        return "undo" if self.times == 1 else f"undo {self.times} times"


Step = Find | Call | Undo


def finds_used(step: Step) -> list[str]:
    """The names of the finds whose matches ``step`` uses."""
    if not isinstance(step, Call):
        return []
    return [value.find for _, given in step.arguments for value in inner(given) if isinstance(value, Picked)]


def _places(at: tuple[str, ...]) -> str:
    return ", ".join(path or "the root" for path in at)


def _counted(counts: int | tuple[int, ...]) -> str:
    return f"{counts} in each" if isinstance(counts, int) else ", ".join(map(str, counts))


def _text(value: Value) -> str:
    return source(value, set())
