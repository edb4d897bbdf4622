"""What the script of a recipe does, step by step, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

import schedule
from schedule import Recipe, call_module
from schedule.recipes.recipe_values import live
from schedule.recipes.steps import Call, Find, Step, Undo
from schedule.util.globs import is_glob

IN_A_GLOB = 2
"""How many modules a glob stands for."""


@dataclass(eq=False)
class StandIn:
    """In place of a match: what is in one module is parallel to each other."""

    schedule: Place
    inputs: dict[str, Any]
    pattern: Any = field(init=False)

    def __post_init__(self) -> None:
        self.pattern = self


class Place:
    """In place of a schedule or a group: a call on it must be the recipe's next step."""

    def __init__(self, reader: Reader, at: tuple[str, ...]) -> None:
        self.reader, self.at = reader, at

    def __getitem__(self, path: str) -> Place:
        assert self.at == ("",), "only the root is indexed"
        return Place(self.reader, (path,))

    def __len__(self) -> int:
        return IN_A_GLOB if is_glob(self.at[0]) else len(self.at)

    def find(self, pattern: Any, expect: int) -> list[StandIn]:
        step = self.reader.next(Find, self.at)
        counts = step.counts if isinstance(step.counts, tuple) else (step.counts,) * len(self)
        assert expect == sum(counts) and alike(pattern, live(step.pattern, {})), self.reader.differs(step)
        found = [self._found(count) for count in counts]
        self.reader.finds[step.name] = found
        return [match for own in found for match in own]

    def _found(self, count: int) -> list[StandIn]:
        member, read = Place(self.reader, self.at), fx.Graph().placeholder("x")
        return [StandIn(member, {"x": read}) for _ in range(count)]

    def undo(self) -> None:
        self.reader.undone += 1
        if self.reader.undone == self.reader.next(Undo, self.at, self.reader.undone == 1).times:
            self.reader.undone = 0

    def __getattr__(self, name: str) -> Any:
        return lambda **arguments: self.call(name, arguments)

    def call(self, primitive: str, arguments: dict[str, Any]) -> None:
        step = self.reader.next(Call, self.at)
        expected = {name: live(value, self.reader.finds) for name, value in step.arguments}
        assert (step.primitive, set(expected)) == (primitive, set(arguments)), self.reader.differs(step)
        assert all(alike(arguments[name], value) for name, value in expected.items()), self.reader.differs(step)


class Reader:
    """Goes through the steps of a recipe; also in place of the package ``schedule`` within the script."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps, self.done, self.undone = steps, 0, 0
        self.finds: dict[str, Any] = {}

    def next(self, kind: type, at: tuple[str, ...], forward: bool = True) -> Any:
        assert self.done < len(self.steps) or not forward, f"the script has more than the {len(self.steps)} steps"
        self.done += forward
        step = self.steps[self.done - 1]
        assert isinstance(step, kind) and getattr(step, "at", ("",)) == at, self.differs(step)
        return step

    def differs(self, step: Step) -> str:
        return f"step {self.done} of {len(self.steps)} is another one in the script: {step}"

    def optimize(self, place: Place, **arguments: Any) -> None:
        place.call("optimize", arguments)

    def Group(self, members: Sequence[Place], name: str) -> Place:
        at = tuple(member.at[0] for member in members)
        assert name == ", ".join(at)
        return Place(self, at)

    def __getattr__(self, name: str) -> Any:
        return getattr(schedule, name)


def alike(one: Any, other: Any) -> bool:
    """Whether two values that primitives are given mean the same."""
    if isinstance(one, call_module) and isinstance(other, call_module):
        return alike(one.what, other.what)
    if isinstance(one, nn.Module):
        return type(one) is type(other) and repr(one) == repr(other)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other) or (isinstance(one, float) and repr(one) == repr(other))


def check_script(recipe: Recipe) -> None:
    """Run the script on stand-ins; fails unless it does what the recipe says, and says at which step it does not."""
    text = recipe.to_python()
    namespace: dict[str, Any] = {}
    exec(compile(text, "recipe.py", "exec"), namespace)
    reader = namespace["schedule"] = Reader(recipe.steps)
    namespace["apply"](Place(reader, ("",)))
    assert (reader.done, reader.undone) == (len(recipe.steps), 0), (
        f"the script ends after step {reader.done} of {len(recipe.steps)}"
    )
