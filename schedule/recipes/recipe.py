"""Recipes: the steps of a schedule as plain frozen data."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fused.whole_files import write_whole
from schedule.recipes.recipe_reader import parsed, steps_of
from schedule.recipes.recipe_values import Reference, Value, inner
from schedule.recipes.script import script
from schedule.recipes.steps import VERSION, Call, Find, Step, Undo, finds_used
from schedule.util.errors import RecipeError


@dataclass(frozen=True)
class Recipe:
    """Changes of a model as data, to repeat by :func:`schedule.replay` or as a script.

    Attributes:
        architecture: class name of the model it was made on; "" for any.
        steps: in order.
        made_with: package → version, for information.
        was_read: whether it comes from JSON, which may be a stranger's: what it names has to be known, or trusted.
    """

    architecture: str
    steps: tuple[Step, ...] = ()
    made_with: Mapping[str, str] = field(default_factory=dict, compare=False)
    was_read: bool = field(default=False, compare=False, repr=False)

    def to_json(self) -> str:
        """Return the recipe as JSON text for :meth:`from_json`.

        Lists, numbers and strings are written as such; ``{"reference": "package.module:name"}`` is a function or
        class, ``{"matches": "m1", …}`` the matches of a find.
        """
        head = {"version": VERSION, "architecture": self.architecture, "made_with": dict(self.made_with)}
        steps = ",\n".join(f"    {json.dumps(step.json())}" for step in self.steps)
        body = f"[\n{steps}\n  ]" if steps else "[]"
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        return "{\n" + ",\n".join([*lines, f'  "steps": {body}']) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Read a recipe written by :meth:`to_json`, edited or not.

        Nothing is imported or executed.

        Raises:
            RecipeError: it is not a recipe, is of a newer version, or has an unknown primitive or a wrong field; gives
                the location.
        """
        return from_data(parsed(text))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the recipe to a file, atomically, and return its path. Missing folders are made.

        Raises:
            RecipeError: it cannot be written there.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.to_json())
        except OSError as error:
            raise RecipeError(f"{path} cannot be written: {error.strerror}", fix="give a file to write to") from error
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe from a file, as :meth:`from_json` does.

        Raises:
            RecipeError: there is no such file, or it is not a recipe.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise RecipeError(
                f"{path} cannot be read: {error.strerror}", fix="give a file that Recipe.save wrote"
            ) from error
        return Recipe.from_json(text.decode(errors="replace"))

    def to_python(self) -> str:
        """Return the recipe as the source of a Python module with a function ``apply(sch)``."""
        return script(self.architecture, self.steps, self.made_with)

    @property
    def references(self) -> tuple[str, ...]:
        """Everything a replay imports and calls, as ``"module:qualname"``."""
        found = [value.name for value in self._values() if isinstance(value, Reference)]
        return tuple(dict.fromkeys(found))

    def diff(self, other: Recipe) -> str:
        """Return the lines to remove (``-``) and to add (``+``) to get ``other``, or "" if there are none."""
        mine, theirs = self._lines(), other._lines()
        changed = [line for line in difflib.ndiff(mine, theirs) if line[0] in "-+"]
        return "\n".join(changed)

    def simplified(self) -> Recipe:
        """Return the recipe without redundant steps: undone calls, overwritten tags and unused finds."""
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


def from_data(data: Any) -> Recipe:
    """Return a recipe from parsed JSON.

    Raises:
        RecipeError: as for :meth:`Recipe.from_json`.
    """
    return Recipe(*steps_of(data), was_read=True)


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
    """Remove calls reverted completely, with their undos, unless finds in between are used later."""
    position = 0
    while position < len(steps):
        undo = steps[position]
        before = next((i for i in range(position - 1, -1, -1) if not isinstance(steps[i], Find)), None)
        call = steps[before] if before is not None else None
        if (
            isinstance(undo, Undo)
            and isinstance(call, Call)
            and before is not None
            and call.history_steps <= undo.times
        ):
            between = {step.name for step in steps[before:position] if isinstance(step, Find)}
            if not any(name in between for step in steps[position:] for name in finds_used(step)):
                rest: list[Step] = [Undo(undo.times - call.history_steps)] if undo.times > call.history_steps else []
                steps = steps[:before] + steps[before + 1 : position] + rest + steps[position + 1 :]
                position = before
                continue
        position += 1
    return steps


def _without_overwritten(steps: list[Step]) -> list[Step]:
    """Keep only the last of repeated settings of a tag with only ``annotate`` calls in between."""
    remaining: list[Step] = []
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
        remaining.append(step)
    return remaining[::-1]
