"""``0.0 == -0.0``, and a forward may tell them apart, wherever it reads the number."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of

ZERO: Any = 0.0


class Plain:
    """An object with numbers in many places."""

    def __init__(self, number: float) -> None:
        self.number, self.listed, self.named = number, [number], {"a": [number]}
        self.fixed, self.held = (1.0, number), [Inner(number)]

    def answer(self) -> float:
        return self.number

    def get_pair(self) -> tuple[float, float]:
        return 1.0, self.number


class Inner:
    def __init__(self, number: float) -> None:
        self.number = number


@dataclass
class Record:
    number: float
    inner: list[float] = field(default_factory=list)


class Net(nn.Module):
    """Reads the sign of a number of its argument, or of its own."""

    def __init__(self, read: Callable[..., float], given: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.read, self.own = read, given

    def forward(self, x: Tensor, given: Any) -> Tensor:
        h = F.gelu(self.first(x))
        return self.second(h) * math.copysign(1.0, self.read(self, given))


def of_global(m: Any, given: Any) -> Any:
    return ZERO


PLACES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[float], Any]]] = {
    "argument": (lambda m, given: given, float),
    "in a tuple": (lambda m, given: given[1], lambda number: (1.0, number)),
    "in a dict": (lambda m, given: given["a"], lambda number: {"a": number}),
    "a complex part": (lambda m, given: given.real, lambda number: complex(number, 1.0)),
    "in a dataclass": (lambda m, given: given.number, Record),
    "in a list of a dataclass": (lambda m, given: given.inner[0], lambda number: Record(1.0, [number])),
    "attribute": (lambda m, given: given.number, Plain),
    "in a list of an object": (lambda m, given: given.listed[0], Plain),
    "in nested containers": (lambda m, given: given.named["a"][0], Plain),
    "in a tuple of an object": (lambda m, given: given.fixed[1], Plain),
    "of an object in a list": (lambda m, given: given.held[0].number, Plain),
    "least of a list": (lambda m, given: min(given.listed), Plain),
    "product": (lambda m, given: given.number * 2.0, Plain),
    "result of a method": (lambda m, given: given.answer(), Plain),
    "in a result of a method": (lambda m, given: given.get_pair()[1], Plain),
    "own object": (lambda m, given: m.own.named["a"][0], Plain),
    "own object's tuple": (lambda m, given: m.own.fixed[1], Plain),
    "global": (of_global, float),
}


@pytest.fixture(autouse=True)
def _put_back() -> Any:
    yield
    set_global(0.0)


def set_global(number: float) -> None:
    global ZERO
    ZERO = number


def agree(module: Any, twin: Any, x: Tensor, given: Any) -> None:
    for each in (module, twin):
        each.own = copy.deepcopy(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", schedule.FallbackWarning)
        torch.testing.assert_close(module(x, copy.deepcopy(given)), twin(x, copy.deepcopy(given)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recorded", [0.0, -0.0], ids=["0", "-0"])
@pytest.mark.parametrize("place", PLACES)
def test_the_sign_is_guarded(place: str, recorded: float) -> None:
    read, made = PLACES[place]
    set_global(recorded)
    module = Net(read, made(recorded))
    twin, x = copy.deepcopy(module), torch.randn(2, 8)
    schedule.optimize(module, (x, made(recorded)), cost_guard=False)
    assert state_of(module) is not None
    for number in (recorded, -recorded, recorded, 1.0, -recorded):
        set_global(number)
        agree(module, twin, x, made(number))


@pytest.mark.parametrize("place", ["attribute", "in a tuple of an object", "in nested containers"])
def test_compiled_code_computes_what_it_does_of_an_untouched_model(place: str) -> None:
    """torch's guards do not tell the sign of zero."""
    read, made = PLACES[place]
    module = Net(read, made(0.0))
    twin, x = copy.deepcopy(module), torch.randn(2, 8)
    schedule.optimize(module, (x, made(0.0)), cost_guard=False)
    results = []
    for each in (module, twin):
        torch._dynamo.reset()
        run = torch.compile(each, backend="eager")
        results.append([run(x, made(number)) for number in (0.0, -0.0, 1.0, -1.0, 0.0)])
    torch.testing.assert_close(*results)
