"""Results of submodules, and what objects among the arguments hold, of another kind than recorded."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import install, state_of
from schedule.util.errors import ScheduleError
from tests.adversary.test_given_objects import Scaled


class Child(nn.Module):
    """A submodule that returns another kind of result by a flag."""

    def __init__(self, other: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.proj, self.other, self.changed = nn.Linear(4, 4), other, False

    def forward(self, x: Tensor) -> Any:
        return self.other(x) if self.changed else self.proj(x)


class Asking(nn.Module):
    """A forward that asks about the result of its child, and has something to rewrite."""

    def __init__(self, other: Callable[[Tensor], Any], ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.child, self.ask = Child(other), ask
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        return nn.functional.gelu(x + self.bias) * self.ask(y)


RESULTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "rank": (lambda x: x[None], lambda y: y.dim()),
    "rank by shape": (lambda x: x[None], lambda y: len(y.shape)),
    "dtype": (lambda x: x.double(), lambda y: 2 if y.dtype == torch.float32 else 3),
    "dtype of what is computed": (lambda x: x.half(), lambda y: (y * 0 + 1).dtype.itemsize),
    "precision": (lambda x: x.half(), lambda y: torch.finfo(y.dtype).bits),
    "floating": (lambda x: x.int(), lambda y: 2 if y.is_floating_point() else 3),
    "device": (lambda x: x.to("meta"), lambda y: 2 if y.device.type == "cpu" else 3),
    "layout": (lambda x: x.to_sparse(), lambda y: 2 if y.layout == torch.strided else 3),
    "None": (lambda x: None, lambda y: 2 if y is None else 3),
    "something": (lambda x: None, lambda y: 2 if y is None else 3),
    "a tuple": (lambda x: (x, x), lambda y: 2 if isinstance(y, tuple) else 3),
    "rank of an item": (lambda x: (x, x[None]), lambda y: y[1].dim() if isinstance(y, tuple) else 1),
    "size": (lambda x: x[:2], lambda y: y.shape[0]),
    "order in memory": (lambda x: x.t(), lambda y: 2 if y.is_contiguous() else 3),
    "gradient": (lambda x: x.detach(), lambda y: 2 if y.requires_grad else 3),
}


@pytest.mark.parametrize("name", RESULTS)
def test_another_kind_of_result_is_noticed(name: str) -> None:
    other, ask = RESULTS[name]
    original, x = Asking(other, ask), torch.randn(3, 4)
    original.child.changed = name == "something"
    scheduled = copy.deepcopy(original)
    schedule.optimize(scheduled, x, cost_guard=False)
    torch.testing.assert_close(scheduled(x), original(x))
    scheduled.child.changed = original.child.changed = name != "something"
    expected = original(x)
    try:
        actual = scheduled(x)
    except ScheduleError as error:
        assert "the result of child is" in str(error)
    else:
        torch.testing.assert_close(actual, expected)
    install(scheduled, None)
    torch.testing.assert_close(scheduled(x), expected)


def test_results_that_nothing_is_asked_about_are_not_checked() -> None:
    original = Asking(lambda x: x.double(), lambda y: y)
    scheduled, x = copy.deepcopy(original), torch.randn(3, 4)
    schedule.optimize(scheduled, x, cost_guard=False)
    scheduled.child.changed = original.child.changed = True
    torch.testing.assert_close(scheduled(x), original(x), atol=1e-5, rtol=1e-5)
    state = state_of(scheduled)
    assert state is not None and state.fallbacks == 0


@dataclasses.dataclass
class Record:
    """A result with two parts."""

    x: Any
    note: Any


class Returning(nn.Module):
    """A submodule that returns what one of two functions makes."""

    def __init__(self, first: Callable[[Tensor], Any], then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.proj, self.first, self.then, self.changed = nn.Linear(4, 4), first, then, False

    def forward(self, x: Tensor) -> Any:
        return (self.then if self.changed else self.first)(x)


Make = Callable[[Tensor], Any]
NOTES: dict[str, tuple[Make, Make, Callable[[Any], Any]]] = {
    "flag": (lambda x: (x, True), lambda x: (x, False), lambda y: 2 if y[1] else 3),
    "number": (lambda x: (x, 1), lambda x: (x, 2), lambda y: y[1]),
    "compared number": (lambda x: (x, 1), lambda x: (x, 2), lambda y: 2 if y[1] == 1 else 3),
    "class of a number": (lambda x: 2, lambda x: 2.5, lambda y: 2 if isinstance(y, int) else 3),
    "type of a number": (lambda x: (x, 2), lambda x: (x, 2.5), lambda y: 2 if type(y[1]) is int else 3),
    "text": (lambda x: (x, "a"), lambda x: (x, "b"), lambda y: 2 if y[1] == "a" else 3),
    "text alone": (lambda x: "a", lambda x: "b", lambda y: 2 if y == "a" else 3),
    "dtype": (lambda x: (x, torch.int8), lambda x: (x, torch.int16), lambda y: 2 if y[1] is torch.int8 else 3),
    "entry": (lambda x: {"a": "u"}, lambda x: {"a": "v"}, lambda y: 2 if y["a"] == "u" else 3),
    "more entries": (lambda x: {"a": x}, lambda x: {"a": x, "b": x}, lambda y: len(y)),
    "text of a dataclass": (lambda x: Record(x, "a"), lambda x: Record(x, "b"), lambda y: 2 if y.note == "a" else 3),
    "None in a dataclass": (lambda x: Record(x, None), lambda x: Record(x, x), lambda y: 2 if y.note is None else 3),
    "object": (lambda x: Named("a"), lambda x: Named("b"), lambda y: 2 if y.name == "a" else 3),
    "module": (lambda x: RELU, lambda x: TANH, lambda y: y(torch.ones(1) / 2)),
    "attribute": (lambda x: x * 1, lambda x: noted(x * 1), lambda y: 2 if hasattr(y, "note") else 3),
}
RELU, TANH = nn.ReLU(), nn.Tanh()


class Named:
    """An object with a name."""

    def __init__(self, name: str) -> None:
        self.name = name


def noted(x: Tensor) -> Tensor:
    x.note = "a"  # type: ignore[attr-defined]
    return x


@pytest.mark.parametrize("name", NOTES)
def test_what_a_result_contains_may_change(name: str) -> None:
    first, then, ask = NOTES[name]
    original, x = Asking(first, ask), torch.randn(3, 4)
    original.child = Returning(first, then)  # type: ignore[assignment]
    scheduled = copy.deepcopy(original)
    schedule.optimize(scheduled, x, cost_guard=False)
    torch.testing.assert_close(scheduled(x), original(x))
    scheduled.child.changed = original.child.changed = True
    torch.testing.assert_close(scheduled(x), original(x))


def test_only_what_is_asked_for_is_checked() -> None:
    original = Asking(lambda x: x.double(), lambda y: y.mean() * 0 + y.shape[-1])
    scheduled, x = copy.deepcopy(original), torch.randn(3, 4)
    schedule.optimize(scheduled, x, cost_guard=False)
    scheduled.child.changed = original.child.changed = True
    torch.testing.assert_close(scheduled(x), original(x), atol=1e-5, rtol=1e-5)


class Held:
    """An object of a user's, passed as an argument."""

    kind = "a"

    def __init__(self) -> None:
        self.function, self.name, self.items, self.nothing = torch.relu, "x", [1.0, 2.0], None
        self.table, self.tensor, self.inner = {"k": "v"}, torch.ones(1), None

    def find(self, key: str) -> Any:
        return self.table.get(key)

    def text(self) -> str:
        return self.name

    @property
    def shown(self) -> str:
        return self.name


HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "function": (lambda h: h.function(torch.ones(1)), lambda h: setattr(h, "function", torch.neg)),
    "text": (lambda h: 2 if h.name == "x" else 3, lambda h: setattr(h, "name", "y")),
    "text of a method": (lambda h: 2 if h.text() == "x" else 3, lambda h: setattr(h, "name", "y")),
    "text of a property": (lambda h: 2 if h.shown == "x" else 3, lambda h: setattr(h, "name", "y")),
    "method replaced": (lambda h: 2 if h.text() == "x" else 3, lambda h: setattr(h, "text", lambda: "z")),
    "nothing found": (lambda h: 2 if h.find("z") is None else 3, lambda h: h.table.update(z=1)),
    "something found": (lambda h: 2 if h.find("k") is None else 3, lambda h: h.table.clear()),
    "length": (lambda h: len(h.items), lambda h: h.items.append(1.0)),
    "sum": (lambda h: sum(h.items), lambda h: h.items.append(1.0)),
    "item": (lambda h: h.items[0], lambda h: h.items.insert(0, 5.0)),
    "None": (lambda h: 2 if h.nothing is None else 3, lambda h: setattr(h, "nothing", 1)),
    "no such attribute": (lambda h: getattr(h, "missing", 2), lambda h: setattr(h, "missing", 3)),
    "hasattr": (lambda h: 2 if hasattr(h, "missing") else 3, lambda h: setattr(h, "missing", 3)),
    "entry": (lambda h: 2 if h.table["k"] == "v" else 3, lambda h: h.table.update(k="w")),
    "entries": (lambda h: len(h.table), lambda h: h.table.update(z="w")),
    "keys": (lambda h: sum(len(key) for key in h.table), lambda h: h.table.update(zz="w")),
    "values": (lambda h: sum(len(value) for value in h.table.values()), lambda h: h.table.update(zz="w")),
    "of the class": (lambda h: 2 if h.kind == "a" else 3, lambda h: setattr(h, "kind", "b")),
    "rank": (lambda h: h.tensor * h.tensor.dim(), lambda h: setattr(h, "tensor", torch.ones(3, 4))),
    "dtype": (
        lambda h: 2 if h.tensor.dtype == torch.float32 else 3,
        lambda h: setattr(h, "tensor", torch.ones(1).int()),
    ),
    "no tensor": (lambda h: 2 if h.tensor is None else h.tensor, lambda h: setattr(h, "tensor", None)),
    "vars": (lambda h: len(vars(h)), lambda h: setattr(h, "more", 1)),
    "dir": (lambda h: len(dir(h)), lambda h: setattr(h, "more", 1)),
    "one object": (lambda h: 2 if h.table is h.table else 3, lambda h: None),
}


@dataclasses.dataclass
class Checked:
    """A dataclass that is not plain: it becomes an input as a whole."""

    x: Any
    note: str = "a"

    def __post_init__(self) -> None:
        pass


class HandingOn(nn.Module):
    """A forward that hands an argument on, and reads nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.bias = Second(), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, held: Any) -> Tensor:
        return nn.functional.gelu(self.child(x, held) + self.bias)


class Second(nn.Module):
    """A submodule with an argument that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor, held: Any) -> Tensor:
        y: Tensor = self.proj(x)
        return y


def test_handing_an_object_on_reads_nothing_of_it() -> None:
    model, x = HandingOn(), torch.randn(3, 4)
    schedule.optimize(model, (x, Checked(x)), cost_guard=False)
    state = state_of(model)
    assert state is not None
    for made in state.specializations:
        assert not made.has_checks
        assert not made.guards


@pytest.mark.parametrize("name", HELD)
def test_what_an_argument_holds_may_change(name: str) -> None:
    read, change = HELD[name]
    original, x, held = Scaled(read), torch.randn(3, 4), Held()
    scheduled = copy.deepcopy(original)
    schedule.optimize(scheduled, (x, held), cost_guard=False)
    torch.testing.assert_close(scheduled(x, held), original(x, held))
    change(held)
    torch.testing.assert_close(scheduled(x, held), original(x, held))


class Counting(nn.Module):
    """A submodule that returns a number beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Any = 2

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x + 1, self.number


class AskingItsNumber(nn.Module):
    """A forward that asks about the number that its submodule returns."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.proj, self.child, self.read = nn.Linear(8, 8), Counting(), read

    def forward(self, x: Tensor) -> Tensor:
        y, number = self.child(nn.functional.gelu(self.proj(x)))
        return y * self.read(number)


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("later", [None, 0, 3, 2.0, True, False, "2", torch.tensor(2)])
@pytest.mark.parametrize(
    "read",
    [
        lambda number: 2.0 if number else 1.0,
        lambda number: 2.0 if number != 3 else 1.0,
        lambda number: 2.0 if number is not None else 1.0,
        lambda number: 2.0 if isinstance(number, int) else 1.0,
        lambda number: 2.0 if torch.full((2,), number).dtype is torch.int64 else 1.0,
        lambda number: float(len(str(number))),
    ],
)
def test_a_returned_number_may_be_of_another_class(read: Callable[[Any], float], later: Any) -> None:
    module, x = AskingItsNumber(read), torch.randn(3, 8)
    twin = copy.deepcopy(module)
    schedule.optimize(module, (x,), cost_guard=False)
    torch.testing.assert_close(module(x), twin(x))
    twin.child.number = module.child.number = later
    try:
        expected = twin(x)
    except TypeError:
        with pytest.raises((TypeError, ScheduleError)):
            module(x)
    else:
        torch.testing.assert_close(module(x), expected)
