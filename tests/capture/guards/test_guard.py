"""Each kind of guard is needed: with it, a change is seen; without it, a scheduled model computes something else."""

from __future__ import annotations

import configparser
import copy
import types
import warnings
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule.capture.specializing.expansion
import schedule.primitives.splicing
from schedule.capture.guards import guard_code, guard_set
from schedule.capture.guards.sources import Query
from schedule.capture.python.state_reads import Reads
from schedule.runtime.scheduled import FallbackWarning
from schedule.util.errors import ScheduleError

X = torch.randn(3, 8)


class Twice:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def thrice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Thrice(Twice):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@runtime_checkable
class Doubles(Protocol):
    """What has such an attribute is an instance."""

    doubles: bool


class Doubling:
    def __init__(self) -> None:
        self.doubles = True


class Model(nn.Module):
    """Something that is rewritten, and one odd read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.setup()

    def setup(self) -> None:
        """Make the state that :meth:`odd` reads."""

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        """Read it."""
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.fc2(F.gelu(self.fc1(x))))


def model(setup: Callable[[Any], None], odd: Callable[[Any, torch.Tensor], torch.Tensor], **members: Any) -> Model:
    """A model of a class of its own."""
    return type("Odd", (Model,), {"setup": setup, "odd": odd, **members})()  # type: ignore[no-any-return]


def _set(**values: Any) -> Callable[[Any], None]:
    return lambda self: [setattr(self, name, copy.copy(value)) for name, value in values.items()] and None


def _tied(self: Any) -> None:
    self.one = self.other = types.SimpleNamespace()


class Cast(nn.Module):
    """Casts, and says nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.gain.dtype)


def _casting(self: Any) -> None:
    self.cast = Cast()


def _in_list(self: Any) -> None:
    self.listed = [nn.Tanh()]


def _bound(self: Any) -> None:
    self.twice = Twice()
    self.call = self.twice.twice


def _missing(self: Any, name: str) -> Any:
    return 2.0 if name == "gain" else nn.Module.__getattr__(self, name)


CASES: dict[str, tuple[Callable[[], Model], Callable[[Any], Any]]] = {
    "is": (
        lambda: model(_set(act=F.silu), lambda self, x: self.act(x)),
        lambda m: setattr(m, "act", F.relu),
    ),
    "same": (
        lambda: model(_set(gain=2), lambda self, x: x * self.gain),
        lambda m: setattr(m, "gain", 3),
    ),
    "content": (
        lambda: model(_set(kinds={1}), lambda self, x: x * 2 if self.kinds == {1} else x),
        lambda m: m.kinds.add(2),
    ),
    "class": (
        lambda: model(_set(by=Twice()), lambda self, x: self.by(x)),
        lambda m: setattr(m, "by", Thrice()),
    ),
    "distinct": (
        lambda: model(
            _set(one=types.SimpleNamespace(), other=types.SimpleNamespace(a=1)),
            lambda self, x: x if self.one is self.other else x * 2,
        ),
        lambda m: setattr(m, "one", m.other),
    ),
    "keys": (
        lambda: model(_set(table={"a": 1}), lambda self, x: x * (1 + len(list(self.table)))),
        lambda m: m.table.update(b=2),
    ),
    "length": (
        lambda: model(_set(items=[1]), lambda self, x: x * len(self.items)),
        lambda m: m.items.append(1),
    ),
    "contains": (
        lambda: model(_set(table={"a": 1}), lambda self, x: x * 2 if "a" in self.table else x),
        lambda m: m.table.clear(),
    ),
    "lacks_item": (
        lambda: model(_set(table={}), lambda self, x: x * 2 if "a" in self.table else x),
        lambda m: m.table.update(a=1),
    ),
    "lacks": (
        lambda: model(_set(), lambda self, x: x * 2 if hasattr(self, "gain") else x),
        lambda m: m.register_buffer("gain", torch.ones(1)),
    ),
    "true": (
        lambda: model(_set(items=[1]), lambda self, x: x * 2 if self.items else x),
        lambda m: m.items.clear(),
    ),
    "false": (
        lambda: model(_set(items=[]), lambda self, x: x * 2 if self.items else x),
        lambda m: m.items.append(1),
    ),
    "calls": (
        lambda: model(_bound, lambda self, x: self.call(x)),
        lambda m: setattr(m, "call", m.twice.thrice),
    ),
    "tensor": (
        lambda: model(
            lambda self: setattr(self, "gain", nn.Parameter(torch.ones(8))),
            lambda self, x: x * 2 if self.gain.dtype == torch.float32 else x,
        ),
        lambda m: setattr(m, "gain", nn.Parameter(torch.ones(8).double())),
    ),
    "computes_in": (
        lambda: model(_casting, lambda self, x: x * 2 if self.cast(x).dtype == torch.float32 else x),
        lambda m: m.cast.bfloat16(),
    ),
    "resolves": (
        lambda: model(_set(), lambda self, x: x * self.gain, __getattr__=_missing),
        lambda m: setattr(_own_class(m), "gain", 3.0),
    ),
    "instance": (
        lambda: model(_set(by=Doubling()), lambda self, x: x * 2 if isinstance(self.by, Doubles) else x),
        lambda m: delattr(m.by, "doubles"),
    ),
    "no_instance": (
        lambda: model(_set(by=types.SimpleNamespace()), lambda self, x: x if isinstance(self.by, Doubles) else x * 2),
        lambda m: setattr(m.by, "doubles", True),
    ),
    "untouched": (
        lambda: model(_in_list, lambda self, x: self.listed[0](x)),
        lambda m: m.listed[0].register_forward_hook(lambda module, given, result: result * 2),
    ),
    "none": (
        lambda: model(lambda self: setattr(self, "fc1", nn.Linear(8, 16, bias=False)), lambda self, x: x),
        lambda m: setattr(m.fc1, "bias", nn.Parameter(torch.ones(16))),
    ),
}


def _own_class(module: nn.Module) -> type:
    return next(cls for cls in type(module).__mro__ if "odd" in vars(cls))


def is_right(case: str) -> bool:
    """Whether a scheduled model computes what its twin does once both are changed."""
    make, change = CASES[case]
    torch.manual_seed(0)
    scheduled = make()
    torch.manual_seed(0)
    twin = make()
    schedule.optimize(scheduled, X, cost_guard=False)
    torch.testing.assert_close(scheduled(X), twin(X))
    change(scheduled), change(twin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return torch.allclose(scheduled(X), twin(X), atol=1e-5)


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(guard_code.CONDITIONS)


@pytest.mark.parametrize("kind", CASES)
def test_a_change_is_seen(kind: str) -> None:
    assert is_right(kind)


@pytest.mark.parametrize("kind", sorted(set(CASES) - {"none"}))
def test_without_the_guard_it_would_not_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Reads.guard

    def dropped(self: Reads, asked: str, *args: Any) -> None:
        if asked != kind:
            guard(self, asked, *args)

    monkeypatch.setattr(Reads, "guard", dropped)
    try:
        right = is_right(kind)
    except (AttributeError, KeyError, TypeError, ScheduleError):
        right = False  # what is gone is asked for all the same, and a result of another dtype is an error
    assert not right


def test_without_guards_on_what_a_consumed_module_is_made_of_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (schedule.capture.specializing.expansion, schedule.primitives.splicing):
        monkeypatch.setattr(user, "module_state_guards", lambda module: guard_set.GuardSet())
    make, change = CASES["none"]
    model = make()
    schedule.optimize(model, X, rules=["linear"], cost_guard=False)
    before = model(X)
    change(model)
    assert torch.equal(model(X), before)


def test_questions_are_told_apart_by_their_arguments() -> None:
    parser, other = configparser.ConfigParser(), configparser.ConfigParser()
    assert Query(repr, (parser, "a")) == Query(repr, (parser, "".join("a")))
    assert Query(parser.get) == Query(parser.get)
    distinct = [(1,), (True,), (1.0,), (0.0,), (-0.0,), ("1",), ((1,),), ((True,),), (parser,), (other,), ()]
    assert len({Query(repr, each) for each in distinct}) == len(distinct)
    assert Query(repr, (1,)) != Query(str, (1,)) and Query(parser.get) != Query(other.get)


def test_an_answer_of_an_object_that_does_not_hash_is_guarded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.settings = nn.Linear(8, 8), configparser.ConfigParser()
            self.settings.read_string("[a]\nb = 2")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.layer(x), approximate="tanh") * self.settings.getfloat("a", "b")

    model = Model()
    assert schedule.optimize(model, X, cost_guard=False).applied
    first = model(X)
    model.settings["a"]["b"] = "4"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        torch.testing.assert_close(model(X), first * 2)
