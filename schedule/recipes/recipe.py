"""A recipe: the steps of a schedule as plain frozen data."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schedule.recipes.values import Picked, Reference, Value, inner, source, to_json

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


@dataclass(frozen=True)
class Recipe:
    """What was done to a model, to be done again: by :func:`schedule.replay`, or as a script.

    Attributes:
        architecture: class of the model that it was made on; "" for any.
        steps: in order.
        made_with: package → version, for the reader.
    """

    architecture: str
    steps: tuple[Step, ...] = ()
    made_with: Mapping[str, str] = field(default_factory=dict, compare=False)

    def to_json(self) -> str:
        """The recipe as JSON text, which :meth:`from_json` reads.

        Lists, numbers and strings stand for themselves; ``{"reference": "package.module:name"}`` is a function or
        class, ``{"matches": "m1", …}`` what a find found.
        """
        head = {"version": VERSION, "architecture": self.architecture, "made_with": dict(self.made_with)}
        steps = ",\n".join(f"    {json.dumps(step.json())}" for step in self.steps)
        body = f"[\n{steps}\n  ]" if steps else "[]"
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        return "{\n" + ",\n".join([*lines, f'  "steps": {body}']) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Read what :meth:`to_json` wrote, or someone edited. Nothing is imported or executed.

        Raises:
            RecipeError: it is no recipe, is of a newer version, or has an unknown primitive or a wrong field; says
                where.
        """
        from schedule.recipes.reading import read

        return read(text)

    def to_python(self) -> str:
        """The recipe as the text of a Python module with a function ``apply(sch)``."""
        from schedule.recipes.script import script

        return script(self)

    @property
    def references(self) -> tuple[str, ...]:
        """What a replay imports and calls, as ``"module:qualname"``: look before you replay a stranger's recipe."""
        found = [value.name for value in self._values() if isinstance(value, Reference)]
        return tuple(dict.fromkeys(found))

    def diff(self, other: Recipe) -> str:
        """What to take out of this recipe (``-``) and to add (``+``) for ``other``; "" if they are the same."""
        mine, theirs = self._lines(), other._lines()
        changed = [line for line in difflib.ndiff(mine, theirs) if line[0] in "-+"]
        return "\n".join(changed)

    def simplified(self) -> Recipe:
        """The recipe without steps that cancel out: what is undone, tags set anew, finds that nobody uses."""
        steps = _without_overwritten(_without_undone(_undos_joined(self.steps)))
        used = {name for step in steps for name in finds_used(step)}
        return replace(self, steps=tuple(s for s in steps if not isinstance(s, Find) or s.name in used))

    def _lines(self) -> list[str]:
        return [f"for a {self.architecture}", *(line.removeprefix("    ") for line in map(str, self.steps))]

    def _values(self) -> Iterator[Value]:
        for step in self.steps:
            if isinstance(step, Find):
                yield from inner(step.pattern)
            elif isinstance(step, Call):
                for _, value in step.arguments:
                    yield from inner(value)

    def __str__(self) -> str:
        made = ", ".join(f"{name} {version}" for name, version in self.made_with.items())
        head = f"Recipe for {self.architecture or 'any model'}" + (f" ({made})" if made else "")
        return "\n".join([head, *(f"{number:4}  {step}" for number, step in enumerate(self.steps, 1))])


def finds_used(step: Step) -> list[str]:
    """The names of the finds whose matches ``step`` uses."""
    if not isinstance(step, Call):
        return []
    return [value.find for _, given in step.arguments for value in inner(given) if isinstance(value, Picked)]


def _undos_joined(steps: Sequence[Step]) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        last = found[-1] if found else None
        if isinstance(step, Undo) and isinstance(last, Undo):
            found[-1] = Undo(last.times + step.times)
        else:
            found.append(step)
    return found


def _without_undone(steps: list[Step]) -> list[Step]:
    """An undo goes with the call that it takes back whole, unless what was found in between is used afterwards."""
    position = 0
    while position < len(steps):
        undo = steps[position]
        before = next((i for i in range(position - 1, -1, -1) if not isinstance(steps[i], Find)), None)
        call = steps[before] if before is not None else None
        if isinstance(undo, Undo) and isinstance(call, Call) and before is not None and call.places <= undo.times:
            between = {step.name for step in steps[before:position] if isinstance(step, Find)}
            if not any(name in between for step in steps[position:] for name in finds_used(step)):
                rest: list[Step] = [Undo(undo.times - call.places)] if undo.times > call.places else []
                steps = steps[:before] + steps[before + 1 : position] + rest + steps[position + 1 :]
                position = before
                continue
        position += 1
    return steps


def _without_overwritten(steps: list[Step]) -> list[Step]:
    """Of tags set again and again, with nothing but tags in between, the last."""
    kept: list[Step] = []
    later: set[Any] = set()
    for step in reversed(steps):
        if not isinstance(step, Call) or step.primitive != "annotate":
            later.clear()
        else:
            given = dict(step.arguments)
            key = (step.at, given.get("name"), given.get("key"))
            if key in later:
                continue
            later.add(key)
        kept.append(step)
    return kept[::-1]


def _places(at: tuple[str, ...]) -> str:
    return ", ".join(path or "the root" for path in at)


def _counted(counts: int | tuple[int, ...]) -> str:
    return f"{counts} in each" if isinstance(counts, int) else ", ".join(map(str, counts))


def _text(value: Value) -> str:
    return source(value, set())
