"""Objects that a forward makes and returns or hands on: their classes, identities and contents."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of
from tests.adversary.effects import Base, pair

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore::UserWarning")


@dataclasses.dataclass
class Record:
    """A result with names."""

    first: Any
    second: Any


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Settings:
    """A plain object."""

    def __init__(self, scale: float) -> None:
        self.scale, self.names = scale, ["a"]

    def get(self) -> float:
        """Return the scale."""
        return self.scale


def _closing(h: Tensor) -> Callable[[], Tensor]:
    return lambda: h * 2


MADE: dict[str, Callable[[Tensor], Any]] = {
    "named result of torch": lambda h: h.max(-1),
    "sorted": lambda h: h.sort(-1),
    "sizes": lambda h: (h, h.shape),
    "named tuple": lambda h: Pair(h, 2),
    "dataclass": lambda h: Record(h, [h]),
    "ordered dict": lambda h: collections.OrderedDict(b=h, a=1),
    "one list twice": lambda h: (kept := [h], kept),
    "one list twice in a dict": lambda h: {"a": (kept := [h]), "b": {"c": kept}},
    "one dataclass twice": lambda h: [kept := Record(h, 1), kept],
    "plain object": lambda h: (h, Settings(2.0)),
    "deque of numbers": lambda h: (h, collections.deque([1, 2])),
}
HOLDING: dict[str, Callable[[Tensor], Any]] = {
    "closure": _closing,
    "partial": lambda h: functools.partial(torch.add, h),
    "deque": lambda h: collections.deque([h]),
    "generator": lambda h: (h * number for number in range(2)),
    "map": lambda h: map(torch.neg, [h]),
    "method of an object": lambda h: Pair(h, 2)._replace,
}


class Returning(Base):
    """Returns what ``make`` makes of its result."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        """Return it."""
        return self.make(self.core(x))


def described(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return the classes, the numbers and the identities of the parts of ``value``."""
    seen = {} if seen is None else seen
    number, kind = seen.setdefault(id(value), len(seen)), type(value).__name__
    if isinstance(value, Tensor):
        return kind, number, [round(each, 4) for each in value.detach().double().flatten().tolist()]
    if isinstance(value, (list, tuple, collections.deque)):
        identity = None if type(value) is tuple else number
        return kind, identity, [described(item, seen) for item in value]
    if isinstance(value, (Record, Settings)):
        value = vars(value)
    if isinstance(value, dict):
        return kind, number, [(key, described(item, seen)) for key, item in value.items()]
    return kind, value


@pytest.mark.parametrize("name", MADE)
def test_a_result_has_its_class_and_its_identities(name: str) -> None:
    model, twin = pair(Returning(MADE[name]), torch.randn(2, 8))
    for rows in (2, 3):
        x = torch.randn(rows, 8)
        first, second = model(x), model(x)
        assert described(first) == described(twin(x))
        assert first is not second
    if isinstance(first, tuple) and isinstance(first[1], (Settings, collections.deque)):
        assert first[1] is not second[1], "each call makes one of its own"
    assert state_of(model) is None or not state_of(model).fallbacks


@pytest.mark.parametrize("name", HOLDING)
def test_an_object_that_holds_a_result_is_not_kept_from_the_trace(name: str) -> None:
    model, _ = pair(Returning(HOLDING[name]), torch.randn(2, 8), rewritten=False)
    report = schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    assert any("that the forward makes is returned" in str(each.reason) for each in report.select(status="skipped"))


class Noting(nn.Module):
    """Keeps the class of what it is handed, and appends to a list."""

    def forward(self, h: Tensor, value: Any, kinds: list[str]) -> Tensor:
        """Multiply."""
        kinds.append(type(value).__name__)
        return h * 2


class Handing(Base):
    """Hands what ``make`` makes to a child, with a list of the caller's."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make, self.child = make, Noting()

    def forward(self, x: Tensor, kinds: list[str]) -> Tensor:
        """Hand it on."""
        h = F.gelu(self.fc1(x))
        return self.fc2(self.child(h, self.make(h), kinds))


@pytest.mark.parametrize("name", MADE)
def test_a_child_is_handed_the_class_and_the_list_that_there_is(name: str) -> None:
    model, twin = pair(Handing(MADE[name]), torch.randn(2, 8), [])
    x, ours, theirs = torch.randn(2, 8), [], []
    torch.testing.assert_close(model(x, ours), twin(x, theirs))
    assert ours == theirs and len(ours) == 1


class Passing(Base):
    """Returns what it is given beside its result."""

    def forward(self, x: Tensor, given: Any) -> Any:
        """Return it."""
        return self.core(x), given


@pytest.mark.parametrize(
    "given", [(torch.ones(2), 3), [torch.ones(2)], {"a": [torch.ones(2)]}, Record(torch.ones(2), 1), Pair(1, 2)]
)
def test_the_callers_own_container_comes_back(given: Any) -> None:
    model, twin = pair(Passing(), torch.randn(2, 8), given)
    x = torch.randn(2, 8)
    for each in (model, twin):
        assert each(x, given)[1] is given
    torch.testing.assert_close(model(x, given)[0], twin(x, given)[0])


class Scaling(nn.Module):
    """Asks the object that it is handed, or calls it."""

    def forward(self, h: Tensor, scale: Any) -> Tensor:
        """Multiply."""
        return h * (scale() if callable(scale) else scale.scale)


class Holding(Base):
    """Hands an object of an object to a child, and returns it."""

    def __init__(self, bound: bool) -> None:
        super().__init__()
        self.child, self.config, self.bound = Scaling(), types.SimpleNamespace(part=Settings(2.0)), bound

    def forward(self, x: Tensor) -> Any:
        """Hand it on."""
        part = self.config.part.get if self.bound else self.config.part
        return self.fc2(self.child(F.gelu(self.fc1(x)), part)), part


@pytest.mark.parametrize("bound", [False, True], ids=["object", "method"])
def test_an_object_that_was_replaced_is_not_used(bound: bool) -> None:
    model, twin = pair(Holding(bound), torch.randn(2, 8))
    x = torch.randn(2, 8)
    for scale in (2.0, 5.0):
        for each in (model, twin):
            each.config.part = Settings(scale)
        (ours, part), (theirs, _) = model(x), twin(x)
        torch.testing.assert_close(ours, theirs)
        assert (part.__self__ if bound else part) is model.config.part


@dataclasses.dataclass
class Counting:
    """A dataclass with more state than its fields."""

    scale: float

    def __post_init__(self) -> None:
        self.log: list[Any] = []


@pytest.mark.parametrize("given", [True, False], ids=["argument", "attribute"])
def test_a_dataclass_from_outside_comes_back(given: bool) -> None:
    record = Counting(2.0)

    class Kept(Passing):
        def forward(self, x: Tensor, own: Any = None) -> Any:
            return self.core(x), own if given else self.record

    module = Kept()
    module.record = record
    model, _ = pair(module, torch.randn(2, 8), *([record] if given else []))
    found = model(torch.randn(2, 8), *([record] if given else []))[1]
    assert found is record and not state_of(model).fallbacks


def test_a_part_of_the_callers_container_comes_back() -> None:
    class Part(Passing):
        def forward(self, x: Tensor, given: Any) -> Any:
            return self.core(x), given["inner"]

    given = {"inner": (torch.ones(2), 1)}
    model, _ = pair(Part(), torch.randn(2, 8), given)
    assert model(torch.randn(2, 8), given)[1] is given["inner"]
