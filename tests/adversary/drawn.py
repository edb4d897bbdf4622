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
from tests.adversary.models import batch
from tests.adversary.statements import names

VALUES = ("1", "2", "3", "1.0", "1.5", "2.0", "0.5", "-1.0", "0", "0.0", "-0.0", "True", "False", "None", "'x'", "'yy'")

Table = dict[str, tuple[str, str, tuple[str, ...]]]

SCALARS: Table = {
    "attribute": ("self.{n} = {v}", "self.{n}", ("self.{n} = {w}",)),
    "absent attribute": ("pass", "getattr(self, '{n}', 0.75)", ("self.{n} = {w}",)),
    "vars": ("self.{n} = {v}", "vars(self)['{n}']", ("self.{n} = {w}",)),
    "list": (
        "self.{n} = [{v}, 2.0]",
        "self.{n}[0]",
        ("self.{n}[0] = {w}", "self.{n} = [{w}]", "self.{n}.insert(0, {w})"),
    ),
    "tuple": ("self.{n} = ({v}, 2.0)", "self.{n}[0]", ("self.{n} = ({w}, 2.0)",)),
    "dict": ("self.{n} = {{'k': {v}}}", "self.{n}['k']", ("self.{n}['k'] = {w}", "self.{n} = {{'k': {w}}}")),
    "dict.get": ("self.{n} = {{}}", "self.{n}.get('k', 0.75)", ("self.{n}['k'] = {w}",)),
    "set": ("self.{n} = {{{v}}}", "({v} in self.{n})", ("self.{n}.clear()", "self.{n} = {{{w}}}")),
    "deque": ("self.{n} = deque([{v}])", "self.{n}[0]", ("self.{n}[0] = {w}",)),
    "defaultdict": ("self.{n} = defaultdict(int, k={v})", "self.{n}['k']", ("self.{n}['k'] = {w}",)),
    "long list": ("self.{n} = [{v}] * 300", "self.{n}[280]", ("self.{n}[280] = {w}",)),
    "dict in list": ("self.{n} = [[{{'k': {v}}}]]", "self.{n}[0][0]['k']", ("self.{n}[0][0]['k'] = {w}",)),
    "object": ("self.{n} = Plain({v})", "self.{n}.k", ("self.{n}.k = {w}", "self.{n} = Plain({w})")),
    "object of object": (
        "self.{n} = Plain(Plain({v}))",
        "self.{n}.k.k",
        ("self.{n}.k.k = {w}", "self.{n}.k = Plain({w})"),
    ),
    "object of objects": ("self.{n} = Plain(Plain(Plain({v})))", "self.{n}.k.k.k", ("self.{n}.k.k.k = {w}",)),
    "object in list": ("self.{n} = [Plain({v})]", "self.{n}[0].k", ("self.{n}[0].k = {w}",)),
    "object in dict": ("self.{n} = {{'k': Plain([{v}])}}", "self.{n}['k'].k[0]", ("self.{n}['k'].k[0] = {w}",)),
    "namespace": ("self.{n} = SimpleNamespace(k={{'a': [{v}]}})", "self.{n}.k['a'][0]", ("self.{n}.k['a'][0] = {w}",)),
    "dataclass": ("self.{n} = Data({v})", "self.{n}.k", ("self.{n}.k = {w}", "self.{n} = Data({w})")),
    "slots": ("self.{n} = Slotted({v})", "self.{n}.k", ("self.{n}.k = {w}",)),
    "named tuple": ("self.{n} = Named({v}, 1)", "self.{n}.k", ("self.{n} = Named({w}, 1)",)),
    "property": ("self.{n} = Plain({v})", "self.{n}.hidden", ("self.{n}.k = {w}",)),
    "own property": ("self.hidden = {v}", "self.shown", ("self.hidden = {w}",)),
    "method of object": ("self.{n} = Plain({v})", "self.{n}.get()", ("self.{n}.k = {w}",)),
    "bound method": ("self.{n}o = Plain({v}); self.{n} = self.{n}o.get", "self.{n}()", ("self.{n}o.k = {w}",)),
    "magic": ("self.{n} = Magic({v})", "self.{n}.anything", ("self.{n}.__dict__['table'] = {w}",)),
    "closure": (
        "self.{n} = closing({v})",
        "self.{n}()",
        ("self.{n}.__closure__[0].cell_contents = {w}", "self.{n} = closing({w})"),
    ),
    "default": (
        "self.{n} = lambda value={v}: value",
        "self.{n}()",
        ("self.{n}.__defaults__ = ({w},)", "self.{n} = lambda: {w}"),
    ),
    "partial": ("self.{n} = partial(identity, {v})", "self.{n}()", ("self.{n} = partial(identity, {w})",)),
    "class attribute": ("type(self).{n} = {v}", "self.{n}", ("module.Drawn.{n} = {w}", "self.{n} = {w}")),
    "global": ("globals()['{n}'] = {v}", "{n}", ("module.{n} = {w}",)),
    "global dict": ("TABLE['{n}'] = {v}", "TABLE['{n}']", ("module.TABLE['{n}'] = {w}",)),
    "child": ("self.{n} = Holder({v})", "self.{n}.k", ("self.{n}.k = {w}", "self.{n} = module.Holder({w})")),
    "grandchild": ("self.{n} = Holder(Holder({v}))", "self.{n}.k.k", ("self.{n}.k.k = {w}",)),
    "child in list": ("self.{n} = [Holder({v})]", "self.{n}[0].k", ("self.{n}[0].k = {w}",)),
    "ModuleList": ("self.{n} = nn.ModuleList([Holder({v})])", "self.{n}[0].k", ("self.{n}[0].k = {w}",)),
    "attribute of Linear": ("self.fc1.{n} = {v}", "self.fc1.{n}", ("self.fc1.{n} = {w}",)),
    "environment": (
        "os.environ['ADVERSARY_{n}'] = str({v})",
        "os.environ['ADVERSARY_{n}']",
        ("setenv('ADVERSARY_{n}', str({w}))",),
    ),
    "child's flag": ("self.{n} = nn.Dropout(0.0)", "self.{n}.training", ("self.{n}.eval()", "self.{n}.train()")),
    "tie": (
        "self.{n} = nn.Linear(8, 8)",
        "(self.{n}.weight is self.fc1.weight)",
        ("self.{n}.weight = self.fc1.weight",),
    ),
    "frozen": (
        "self.{n} = nn.Linear(8, 8)",
        "self.{n}.weight.requires_grad",
        ("self.{n}.weight.requires_grad_(False)",),
    ),
    "length": ("self.{n} = [1, 2]", "len(self.{n})", ("self.{n}.append(3)", "self.{n}.pop()")),
    "hasattr": ("pass", "hasattr(self, '{n}')", ("self.{n} = {w}", "self.register_buffer('{n}', torch.ones(1))")),
}
"""Kind → what sets it up, what reads it, what changes it; of a plain value."""

TENSORS: Table = {
    "parameter": (
        "self.{n} = P(torch.full((8,), 1.5))",
        "self.{n}",
        ("self.{n} = None", "self.{n}.data.mul_(2)", "self.{n} = P(torch.ones(1))"),
    ),
    "no parameter": ("self.register_parameter('{n}', None)", "self.{n}", ("self.{n} = P(torch.full((8,), 1.5))",)),
    "buffer": (
        "self.register_buffer('{n}', torch.full((8,), 1.5))",
        "self.{n}",
        ("self.{n} = None", "self.{n}.mul_(2)", "self.{n} = torch.ones(8)"),
    ),
    "no buffer": ("self.register_buffer('{n}', None)", "self.{n}", ("self.{n} = torch.full((8,), 1.5)",)),
    "tensor": (
        "self.{n} = torch.full((8,), 1.5)",
        "self.{n}",
        ("self.{n}.mul_(2)", "self.{n} = torch.ones(8)", "self.{n} = None"),
    ),
    "tensor in list": (
        "self.{n} = [torch.full((8,), 1.5)]",
        "self.{n}[0]",
        ("self.{n}[0] = torch.ones(8)", "self.{n}[0].mul_(2)"),
    ),
    "tensor in object": (
        "self.{n} = Plain(torch.full((8,), 1.5))",
        "self.{n}.k",
        ("self.{n}.k = torch.ones(8)", "self.{n}.k = None"),
    ),
    "child's parameter": (
        "self.{n} = nn.Linear(8, 8)",
        "self.{n}.bias",
        ("self.{n}.bias = None", "self.{n}.bias = P(torch.ones(8))", "self.{n} = nn.Linear(8, 8)"),
    ),
}
"""The same, of a tensor or None."""

EFFECTS: Table = {
    "counter": ("self.{n} = 0", "self.{n} += 1", ("self.{n} = 5",)),
    "append": ("self.{n} = []", "self.{n}.append(h.dim())", ("self.{n}.clear()", "self.{n} = [1]")),
    "dict set": ("self.{n} = {{}}", "self.{n}['k'] = self.{n}.get('k', 0) + 1", ("self.{n}.clear()",)),
    "object counter": ("self.{n} = Plain(0)", "self.{n}.k += 1", ("self.{n}.k = 7",)),
    "global counter": ("TABLE['{n}'] = 0", "TABLE['{n}'] += 1", ("module.TABLE['{n}'] = 7",)),
    "buffer counter": (
        "self.register_buffer('{n}', torch.zeros(()))",
        "self.{n} += 1; h = h + self.{n}",
        ("self.{n}.zero_()",),
    ),
    "kept": ("self.{n} = None", "self.{n} = h.detach()", ("self.{n} = None",)),
    "kept list": ("self.{n} = [None]", "self.{n}[0] = h", ("self.{n} = [None]",)),
}
"""What a forward does: how it is set up, what is done, what changes it."""

USES = (
    "h = h * num({e})",
    "h = h + num({e})",
    "h = h + (0.5 if {e} else 0.25)",
    "h = h * 1.5 if {e} is None else h",
    "h = h + 0.5 if num({e}) > 1.25 else h",
    "h = h * kind({e})",
    "h = h + 0.1 * len(str({e}))",
    "h = h * math.copysign(1.0, num({e}))",
)
TENSOR_USES = (
    "h = h if {e} is None else h * {e}",
    "h = h + (0.5 if {e} is None else {e})",
    "h = h * (1.5 if {e} is not None else 1)",
)

_HEAD = """import math, os
from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter as P

TABLE = {}
Named = namedtuple("Named", "k other")

class Plain:
    def __init__(self, k): self.k = k
    def get(self): return self.k
    @property
    def hidden(self): return self.k

@dataclass
class Data:
    k: Any

class Slotted:
    __slots__ = ("k",)
    def __init__(self, k): self.k = k

class Magic:
    def __init__(self, k): self.__dict__["table"] = k
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return self.__dict__["table"]

class Holder(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

def closing(value): return lambda: value
def identity(value): return value
def num(value): return 0.25 if value is None else float(len(value)) if isinstance(value, str) else value
def kind(value): return 1.5 if isinstance(value, bool) else 1.0 if isinstance(value, int) else 2.0
"""


@dataclass(frozen=True)
class Part:
    """A piece of state.

    Attributes:
        kind: of :data:`SCALARS`, :data:`TENSORS` or :data:`EFFECTS`.
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
        return {**SCALARS, **TENSORS, **EFFECTS}[self.kind]

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
    """Changes, and then a call."""

    changes: tuple[Change, ...]
    rows: int = 2
    training: bool = True


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
        lines = [_HEAD, "class Drawn(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += ["        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)"]
        lines += [f"        {part.filled(part.texts[0])}" for part in self.parts]
        if any(part.kind == "own property" for part in self.parts):
            lines += ["    @property", "    def shown(self): return self.hidden"]
        lines += ["    def forward(self, x):", "        h = x"]
        lines += [f"        {use}" for use in uses[: self.early]]
        lines += ["        h = F.gelu(self.fc1(h))"]
        lines += [f"        {use}" for use in uses[self.early :]]
        lines += ["        return x + self.fc2(h)", "", "class Stack(nn.Module):", "    def __init__(self):"]
        lines += ["        super().__init__()", "        self.layers = nn.ModuleList([Drawn() for _ in range(2)])"]
        lines += [
            "    def forward(self, x):",
            "        for layer in self.layers:",
            "            x = layer(x)",
            "        return x",
        ]
        return "\n".join([*lines, ""])

    @property
    def story(self) -> str:
        """The module without the file's head, and what is done to it."""
        own = self.source[len(_HEAD) :].split("class Stack")[0].strip()
        done = [f"before scheduling: {each}" for each in self.texts(self.before)]
        for round_ in self.rounds:
            done += [f"then: {each}" for each in self.texts(round_.changes)]
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
        _do(texts, model, world)
        model.train(round_.training)
        given = {"x": torch.cat([given["x"].detach()] * 3)[: round_.rows].requires_grad_()}
        return step(model, given, world)

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
        tables = [(SCALARS, USES)] * 7 + [(TENSORS, TENSOR_USES)] * 2 + [(EFFECTS, ("{e}",))] * effects
        table, uses = self.random.choice(tables)
        part = Part(name, self.random.choice([*table]), self.random.choice(VALUES), ())
        chosen = [self.random.choice(uses) for _ in range(self.random.choice((0, 1, 1, 2)))]
        return dataclasses.replace(part, uses=tuple(use.format(e=part.filled(part.texts[1])) for use in chosen))

    def round(self, named: list[str], quiet: bool) -> Round:
        """Changes and a call."""
        changes = self.changes(named, 1 if quiet else 0)
        return Round(changes, 2 if quiet else self.random.choice((2, 2, 1, 5, 6)), quiet or self.random.random() < 0.7)

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
