"""Modules drawn at random: Python state of all kinds, a forward that reads some of it, changes between calls.

A :class:`Spec` is plain data. From it a Python file is written and loaded, so that everything that asks for source code
finds it; the forward always has a Linear and GELU in it, which the default rules rewrite.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.adversary.calls import step
from tests.adversary.cases import WRONG, Batch, Call, Case, Disturbance, Model, Verdict, World
from tests.adversary.harness import judge
from tests.adversary.kinds import (
    EFFECTS,
    GIVEN_EFFECTS,
    GIVEN_SCALARS,
    GIVEN_TENSORS,
    HEAD,
    SCALARS,
    TENSOR_USES,
    TENSORS,
    USES,
    VALUES,
)
from tests.adversary.models import batch
from tests.adversary.statements import names


@dataclass(frozen=True)
class Part:
    """A piece of state.

    Attributes:
        kind: of :data:`SCALARS`, :data:`TENSORS` or :data:`EFFECTS`, or of those of an object that is handed in.
        value: what it is at first.
        uses: what the forward does with it; nothing where it is not read.
    """

    name: str
    kind: str
    value: str
    uses: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, str, tuple[str, ...]]:
        """Set up, read, changes."""
        return {**SCALARS, **TENSORS, **EFFECTS, **GIVEN_SCALARS, **GIVEN_TENSORS, **GIVEN_EFFECTS}[self.kind]

    def filled(self, text: str, new: str = "") -> str:
        """``text`` about this part."""
        return text.format(n=self.name, v=self.value, w=new)


@dataclass(frozen=True)
class Change:
    """What is done to a part, before a call."""

    part: str
    which: int
    value: str


@dataclass(frozen=True)
class Round:
    """Changes, and then a call.

    Attributes:
        during: the changes are made by a hook on a submodule, amid the call.
    """

    changes: tuple[Change, ...]
    rows: int = 2
    training: bool = True
    during: bool = False


_BETWEEN = ["class Between(nn.Module):", "    def __init__(self):", "        super().__init__()"]
_BETWEEN += ["        self.inner = nn.Identity()", "    def forward(self, x): return self.inner(x)", ""]


@dataclass(frozen=True)
class Spec:
    """A module and what happens to it.

    Attributes:
        parts: its state.
        before: what is changed in one of the layers before the model is scheduled.
        rounds: what happens afterwards.
        early: how many uses come before the GELU.
    """

    parts: tuple[Part, ...]
    before: tuple[Change, ...]
    rounds: tuple[Round, ...]
    early: int = 0

    @property
    def source(self) -> str:
        """The Python file of the module."""
        uses = [use for part in self.parts for use in part.uses]
        lines = [HEAD, *_BETWEEN, "class Drawn(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        between = any(round_.during for round_ in self.rounds)
        lines += ["        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)"]
        lines += ["        self.between = Between()"] * between
        given = any(part.kind.startswith("given ") for part in self.parts)
        lines += ["        self.given = Given()"] * given
        lines += [f"        {part.filled(part.texts[0])}" for part in self.parts]
        if any(part.kind == "own property" for part in self.parts):
            lines += ["    @property", "    def shown(self): return self.hidden"]
        lines += [f"    def forward(self, x{', given' * given}):", "        h = x"]
        lines += [f"        {use}" for use in uses[: self.early]]
        lines += ["        h = F.gelu(self.fc1(h))", *["        h = self.between(h)"] * between]
        lines += [f"        {use}" for use in uses[self.early :]]
        lines += ["        return x + self.fc2(h)", "", "class Stack(nn.Module):", "    def __init__(self):"]
        lines += ["        super().__init__()", "        self.layers = nn.ModuleList([Drawn() for _ in range(2)])"]
        lines += [
            "    def forward(self, x):",
            "        for layer in self.layers:",
            f"            x = layer(x{', layer.given' * given})",
            "        return x",
        ]
        return "\n".join([*lines, ""])

    @property
    def story(self) -> str:
        """The module without the file's head, and what is done to it."""
        own = self.source[len(HEAD) :].split("class Stack")[0].strip()
        done = [f"before scheduling: {each}" for each in self.texts(self.before)]
        for round_ in self.rounds:
            when = "during the call" if round_.during else "then"
            done += [f"{when}: {each}" for each in self.texts(round_.changes)]
            done += [f"called with {round_.rows} rows in {'training' if round_.training else 'evaluation'}"]
        return "\n".join([own, *done])

    @property
    def kinds(self) -> str:
        """Kinds of state in it, for grouping."""
        return " + ".join(sorted({part.kind for part in self.parts})) or "none"

    def texts(self, changes: tuple[Change, ...]) -> list[str]:
        """Changes as statements."""
        parts = {part.name: part for part in self.parts}
        found = [(parts[each.part], each) for each in changes if each.part in parts]
        return [part.filled(part.texts[2][each.which % len(part.texts[2])], each.value) for part, each in found]

    @property
    def only_unread(self) -> bool:
        """Whether all that changes afterwards is not read."""
        unread = {part.name for part in self.parts if not part.uses}
        changes = [each for round_ in self.rounds for each in round_.changes]
        return bool(changes) and not self.before and all(each.part in unread for each in changes)


_directory = tempfile.TemporaryDirectory(prefix="adversary")


def case_of(spec: Spec, rules: str = "default") -> Case:
    """The case that ``spec`` describes."""
    source = spec.source
    file = Path(_directory.name) / f"drawn_{hashlib.sha1(source.encode()).hexdigest()[:12]}.py"
    file.write_text(source)

    def build(world: World) -> nn.Module:
        made: nn.Module = world.load(file).Stack()
        return made

    before = Disturbance("drawn", lambda model, world: _do(spec.texts(spec.before), model, world), ("drawn",))
    calls = tuple(Call(f"round {i}", _round(spec.texts(each.changes), each)) for i, each in enumerate(spec.rounds))
    return Case(Model("drawn", build, batch), rules, before, "before", calls)


def _do(texts: list[str], model: nn.Module, world: World) -> None:
    scope = {**names(model, world), "setenv": lambda name, value: _set_environment(name, value)}
    module = scope["module"]
    for text in texts:
        exec(compile(text, "<change>", "exec"), {**vars(module), **scope})


def _set_environment(name: str, value: str) -> None:
    import os

    os.environ[name] = value  # each run sets it anew when its model is built


def _round(texts: list[str], round_: Round) -> Any:
    def run(model: nn.Module, given: Batch, world: World) -> Any:
        left = [texts]  # a hook changes the state once
        if not round_.during:
            _do(left.pop(), model, world)
        model.train(round_.training)
        given = {"x": torch.cat([given["x"].detach()] * 3)[: round_.rows].requires_grad_()}
        if not round_.during:
            return step(model, given, world)
        layers: Any = model.layers
        hook = layers[1].between.register_forward_hook(lambda *_: _do(left.pop(), model, world) if left else None)
        try:
            return step(model, given, world)
        finally:
            hook.remove()

    return run


# -- drawing --------------------------------------------------------------------------------------------------------


def specs() -> st.SearchStrategy[Spec]:
    """Modules and what happens to them, as even as random numbers are; :func:`shrunk` makes them smaller."""
    return st.integers(0, 2**62).map(lambda number: _Drawing(random.Random(number)).spec())


@dataclass
class _Drawing:
    random: random.Random

    def spec(self) -> Spec:
        """A module and what happens to it; in every fifth only state changes that is not read."""
        quiet = self.random.random() < 0.2
        parts = [self.part(f"s{index}", effects=not quiet) for index in range(self.random.randint(1, 4))]
        if quiet:
            parts += [dataclasses.replace(self.part(f"u{index}", False), uses=()) for index in range(2)]
        named = [part.name for part in parts if not quiet or not part.uses]
        rounds = [self.round(named, quiet) for _ in range(self.random.randint(1, 3))]
        before = () if quiet or self.random.random() < 0.6 else self.changes(named, 1)
        return Spec(tuple(parts), before, tuple(rounds), self.random.randint(0, 2))

    def part(self, name: str, effects: bool) -> Part:
        """A piece of state, read or not."""
        tables = [(SCALARS, USES)] * 6 + [(TENSORS, TENSOR_USES)] * 2 + [(EFFECTS, ("{e}",))] * effects
        tables += [(GIVEN_SCALARS, USES)] * 2 + [(GIVEN_TENSORS, TENSOR_USES), (GIVEN_EFFECTS, ("{e}",))] * effects
        table, uses = self.random.choice(tables)
        part = Part(name, self.random.choice([*table]), self.random.choice(VALUES), ())
        chosen = [self.random.choice(uses) for _ in range(self.random.choice((0, 1, 1, 2)))]
        return dataclasses.replace(part, uses=tuple(use.format(e=part.filled(part.texts[1])) for use in chosen))

    def round(self, named: list[str], quiet: bool) -> Round:
        """Changes and a call."""
        changes = self.changes(named, 1 if quiet else 0)
        rows = 2 if quiet else self.random.choice((2, 2, 1, 5, 6))
        training = quiet or self.random.random() < 0.7
        return Round(changes, rows, training, bool(changes) and not quiet and self.random.random() < 0.2)

    def changes(self, named: list[str], least: int) -> tuple[Change, ...]:
        """Some changes."""
        count = self.random.randint(least, 2)
        choice, number = self.random.choice, self.random.randrange
        return tuple(Change(choice(named), number(3), choice(VALUES)) for _ in range(count))


# -- shrinking ------------------------------------------------------------------------------------------------------


def smaller(spec: Spec) -> Iterator[Spec]:
    """Each spec with one thing less."""
    for index in range(len(spec.rounds)):
        if len(spec.rounds) > 1:
            yield dataclasses.replace(spec, rounds=spec.rounds[:index] + spec.rounds[index + 1 :])
    for index, part in enumerate(spec.parts):
        yield dataclasses.replace(spec, parts=spec.parts[:index] + spec.parts[index + 1 :])
        for place in range(len(part.uses)):
            less = dataclasses.replace(part, uses=part.uses[:place] + part.uses[place + 1 :])
            yield dataclasses.replace(spec, parts=(*spec.parts[:index], less, *spec.parts[index + 1 :]))
    if spec.before:
        yield dataclasses.replace(spec, before=spec.before[1:])
    for index, round_ in enumerate(spec.rounds):
        for place in range(len(round_.changes)):
            less_ = dataclasses.replace(round_, changes=round_.changes[:place] + round_.changes[place + 1 :])
            yield dataclasses.replace(spec, rounds=(*spec.rounds[:index], less_, *spec.rounds[index + 1 :]))
        if not round_.training or round_.rows != 2:
            usual = dataclasses.replace(round_, training=True, rows=2)
            yield dataclasses.replace(spec, rounds=(*spec.rounds[:index], usual, *spec.rounds[index + 1 :]))
    if spec.early:
        yield dataclasses.replace(spec, early=0)


def shrunk(spec: Spec, most: int = 60) -> tuple[Spec, Verdict]:
    """The smallest spec, found by leaving things out, that is still wrong; at most ``most`` tries."""
    verdict, tried, going = judge(case_of(spec)), 0, True
    while going and tried < most:
        going = False
        for each in smaller(spec):
            tried += 1
            found = judge(case_of(each))
            if found.kind == WRONG:
                spec, verdict, going = each, found, True
                break
            if tried >= most:
                break
    return spec, verdict
