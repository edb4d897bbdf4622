"""Objects and functions among the arguments: what the forward reads of them, or calls of them, may change."""

from __future__ import annotations

import array
import copy
import functools
import types
from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import schedule


class Settings:
    """An object with one number, and a method to return it."""

    def __init__(self, gain: float = 2.0) -> None:
        self.gain = gain

    def __call__(self) -> float:
        return self.gain


def of_list(values: list[float]) -> float:
    return values[0]


class Scaled(nn.Module):
    """A forward with a fused part, scaled by what it reads of an argument."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read, self.bias = read, nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return nn.functional.gelu(x + self.bias) * self.read(given)


def call(given: Any) -> Any:
    return given()


def first(given: Any) -> Any:
    return given[0]


def by_key(given: Any) -> Any:
    return given["gain"]


def set_gain(given: Any) -> None:
    given.gain = 5.0


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bound method": (lambda: Settings().__call__, call, lambda given: set_gain(given.__self__)),
    "partial": (lambda: functools.partial(of_list, [2.0]), call, lambda given: given.args[0].insert(0, 5.0)),
    "partial of a method": (
        lambda: functools.partial(Settings().__call__),
        call,
        lambda given: set_gain(given.func.__self__),
    ),
    "method in C": (lambda: [2.0].__getitem__, lambda g: g(0), lambda g: g.__self__.insert(0, 5.0)),
    "special method in C": (lambda: [2.0].__len__, call, lambda given: given.__self__.append(5.0)),
    "get": (lambda: {"gain": 2.0}.get, lambda g: g("gain"), lambda g: g.__self__.update(gain=5.0)),
    "object": (Settings, lambda given: given.gain, set_gain),
    "callable": (Settings, call, set_gain),
    "keys": (lambda: KEYED.keys(), lambda g: float(len(g)), lambda g: KEYED.update(other=5.0)),
    "deque": (lambda: deque([2.0]), first, lambda given: given.appendleft(5.0)),
    "array": (lambda: array.array("d", [2.0]), first, lambda given: given.insert(0, 5.0)),
    "numpy": (lambda: np.full(1, 2.0), lambda g: float(g[0]), lambda g: g.fill(5.0)),
    "ordered dict": (lambda: OrderedDict(gain=2.0), by_key, lambda given: given.update(gain=5.0)),
    "user dict": (lambda: UserDict(gain=2.0), by_key, lambda given: given.update(gain=5.0)),
    "chain of dicts": (lambda: ChainMap({"gain": 2.0}), by_key, lambda given: given.update(gain=5.0)),
    "set": (set, lambda given: float(len(given) + 1), lambda given: given.add(5.0)),
    "function": (lambda: functools.wraps(of_list)(lambda: 2.0), call, lambda g: setattr(g, "__code__", FIVE)),
    "namespace": (lambda: types.SimpleNamespace(gain=2.0), lambda given: given.gain, set_gain),
}
KEYED = {"gain": 2.0}
FIVE = (lambda: 5.0).__code__


@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_reads_of_an_argument_may_change(name: str) -> None:
    make, read, change = CASES[name]
    original, given, x = Scaled(read), make(), torch.randn(3, 4)
    scheduled = copy.deepcopy(original)
    schedule.optimize(scheduled, (x, given), cost_guard=False)
    torch.testing.assert_close(scheduled(x, given), original(x, given))
    change(given)
    torch.testing.assert_close(scheduled(x, given), original(x, given))


def test_a_generator_is_an_argument() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return nn.functional.gelu(x + self.bias) + torch.randn(x.shape, generator=generator)

    original, x = Noisy(), torch.randn(3, 4)
    scheduled = copy.deepcopy(original)
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    schedule.optimize(scheduled, (x, generator), cost_guard=False)
    assert torch.equal(generator.get_state(), state)
    for _ in range(2):
        twin = torch.Generator()
        twin.set_state(generator.get_state())
        torch.testing.assert_close(scheduled(x, generator), original(x, twin))
        assert torch.equal(generator.get_state(), twin.get_state())
