"""Objects read from an argument that a graph is made for: functions, objects to call, members of enums, texts."""

from __future__ import annotations

import copy
import enum
import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Scale:
    """All objects of this class are equal."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale)

    def __hash__(self) -> int:
        return 1


class Text(str):
    """A text of the user's own class."""


class Mode(enum.StrEnum):
    FIRST, SECOND = "first", "second"


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Bits(enum.Flag):
    A, B = 1, 2


class Net(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(8, 8), nn.Linear(8, 8), read

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return self.read(given, self.second(F.gelu(self.first(x))))


def called(given: Any, x: Tensor) -> Tensor:
    return given.part(x)


def called_in_list(given: Any, x: Tensor) -> Tensor:
    return given.part[0](x)


def compared(given: Any, x: Tensor) -> Tensor:
    return x * (2.0 if given.part is given.other else 1.0)


def is_member(given: Any, x: Tensor) -> Tensor:
    return x * (2.0 if given.part is Mode.FIRST or given.part is Level.LOW else 1.0)


def is_member_in_list(given: Any, x: Tensor) -> Tensor:
    return x * (2.0 if given.part[0] is Mode.FIRST or given.part[0] is Level.LOW else 1.0)


def has_bit(given: Any, x: Tensor) -> Tensor:
    return x * (2.0 if given.part & Bits.A else 1.0)


def is_text(given: Any, x: Tensor) -> Tensor:
    return x * (2.0 if type(given.part) is Text else 1.0)


def has_mark(given: Any, x: Tensor) -> Tensor:
    return x * (2.0 if hasattr(given.part, "mark") else 1.0)


def marked() -> Text:
    text = Text("first")
    text.mark = True  # type: ignore[attr-defined]
    return text


Made = Callable[[], Any]
CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Made, tuple[Made, ...]]] = {
    "an object to call": (called, lambda: Scale(2.0), (lambda: Scale(3.0), lambda: torch.relu)),
    "one in a list": (called_in_list, lambda: [Scale(2.0)], (lambda: [Scale(3.0)], lambda: [torch.relu])),
    "a bound method": (called, lambda: Scale(2.0).__call__, (lambda: Scale(3.0).__call__,)),
    "a partial": (
        called,
        lambda: functools.partial(torch.mul, other=2.0),
        (lambda: functools.partial(torch.mul, other=3.0),),
    ),
    "a getter": (
        lambda given, x: given.part([x, x + 1]),
        lambda: operator.itemgetter(0),
        (lambda: operator.itemgetter(1),),
    ),
    "a member": (is_member, lambda: Mode.FIRST, (lambda: Mode.SECOND, lambda: "first", lambda: Text("first"))),
    "a number's member": (is_member, lambda: Level.LOW, (lambda: Level.HIGH, lambda: 1, lambda: True)),
    "a member in a list": (is_member_in_list, lambda: [Mode.FIRST], (lambda: [Mode.SECOND], lambda: ["first"])),
    "a number's member in a list": (is_member_in_list, lambda: [Level.LOW], (lambda: [Level.HIGH], lambda: [1])),
    "a flag": (has_bit, lambda: Bits.A, (lambda: Bits.B, lambda: Bits.A | Bits.B)),
    "a text of a class": (is_text, lambda: Text("first"), (lambda: "first", lambda: Text("second"))),
    "a text with an attribute": (has_mark, lambda: Text("first"), (marked, lambda: "first")),
    "a text": (is_text, lambda: "first", (lambda: Text("first"), lambda: "second")),
}


def agree(module: nn.Module, twin: nn.Module, x: Tensor, given: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", schedule.FallbackWarning)
        torch.testing.assert_close(module(x, given), twin(x, given))


@pytest.mark.parametrize("case", CASES)
def test_other_objects_that_are_equal_are_told_apart(case: str) -> None:
    read, made, others = CASES[case]
    module, x = Net(read), torch.randn(2, 8)
    twin = copy.deepcopy(module)
    first = Holder(part=made())
    schedule.optimize(module, (x, first), cost_guard=False)
    for part in (first.part, *(other() for other in others), first.part, made()):
        agree(module, twin, x, Holder(part=part))
    first.part = others[0]()
    agree(module, twin, x, first)


@pytest.mark.parametrize("same", [False, True])
def test_whether_two_objects_to_call_are_one_is_guarded(same: bool) -> None:
    module, x, one = Net(compared), torch.randn(2, 8), Scale(1.0)
    twin = copy.deepcopy(module)
    schedule.optimize(module, (x, Holder(part=one, other=one if same else Scale(1.0))), cost_guard=False)
    for other in (one, Scale(1.0)):
        agree(module, twin, x, Holder(part=one, other=other))


def test_enums_do_not_keep_a_module_from_being_rewritten() -> None:
    for part in (Mode.FIRST, Level.LOW):
        module = Net(is_member)
        schedule.optimize(module, (torch.randn(2, 8), Holder(part=part)), cost_guard=False)
        assert state_of(module) is not None


# -- reads in a block that handles their errors ----------------------------------------------------------------


class Lookup(Holder):
    @property
    def positive(self) -> float:
        if self.number <= 0:
            raise AttributeError("positive")
        return float(self.number)

    def look(self, key: str) -> float:
        return float(self.items[key])

    def __getitem__(self, key: str) -> float:
        return float(self.items[key])


def item(given: Any) -> float:
    try:
        return given.items["a"]  # type: ignore[no-any-return]
    except KeyError:
        return 7.0


def attribute(given: Any) -> float:
    try:
        return 2.0 if given.text == "a" else 3.0
    except AttributeError:
        return 7.0


def property_(given: Any) -> float:
    try:
        return given.positive  # type: ignore[no-any-return]
    except AttributeError:
        return 7.0


def method(given: Any) -> float:
    try:
        return given.look("a")  # type: ignore[no-any-return]
    except KeyError:
        return 7.0


def operator_(given: Any) -> float:
    try:
        return given["a"]  # type: ignore[no-any-return]
    except KeyError:
        return 7.0


def quotient(given: Any) -> float:
    try:
        return 6.0 / given.number  # type: ignore[no-any-return]
    except ZeroDivisionError:
        return 7.0


def listed(given: Any) -> float:
    try:
        return given.numbers[1]  # type: ignore[no-any-return]
    except IndexError:
        return 7.0


class Handling(nn.Module):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(8, 8), nn.Linear(8, 8), read

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return self.second(F.gelu(self.first(x))) * self.read(given)


def lookup(**changed: Any) -> Lookup:
    given = Lookup(**{"items": {"a": 2.0}, "text": "a", "number": 2.0, "numbers": [1.0, 2.0], **changed})
    return Lookup(**{name: part for name, part in vars(given).items() if part is not ...})


@pytest.mark.parametrize("read", [item, attribute, property_, method, operator_, quotient, listed])
def test_an_error_that_the_forward_handles(read: Callable[[Any], float]) -> None:
    module, x = Handling(read), torch.randn(2, 8)
    twin = copy.deepcopy(module)
    schedule.optimize(module, (x, lookup()), cost_guard=False)
    changes: tuple[dict[str, Any], ...] = ({"items": {}}, {"text": ...}, {"number": 0.0}, {"numbers": [1.0]})
    for changed in ({}, *changes, {"items": {"a": 3.0}, "text": "b", "number": 3, "numbers": [1.0, 5.0]}):
        agree(module, twin, x, lookup(**changed))
