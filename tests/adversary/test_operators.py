"""Operators of objects that a module holds: what their special methods read is guarded, as what a call reads is."""

from __future__ import annotations

import copy
import functools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule


class Amount:
    """A number of the user's, with every operator, and a call."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __add__(self, other: Any) -> Any:
        return self.number + other

    def __rsub__(self, other: Any) -> Any:
        return other - self.number

    def __iadd__(self, other: Any) -> Any:
        return self.number + 2 * other

    def __matmul__(self, other: Any) -> Any:
        return self.number * other

    def __neg__(self) -> Any:
        return -self.number

    def __abs__(self) -> Any:
        return abs(self.number)

    def __invert__(self) -> Any:
        return ~self.number

    def __lt__(self, other: Any) -> bool:
        return self.number < (other.number if isinstance(other, Amount) else other)

    def __eq__(self, other: object) -> bool:
        return self.number == (other.number if isinstance(other, Amount) else other)

    def __hash__(self) -> int:
        return 1

    def __float__(self) -> float:
        return float(self.number)

    def __int__(self) -> int:
        return self.number

    def __index__(self) -> int:
        return self.number

    def __round__(self, digits: int = 0) -> int:
        return self.number

    def __ceil__(self) -> int:
        return self.number

    def __format__(self, how: str) -> str:
        return str(self.number)

    def __str__(self) -> str:
        return str(self.number)

    def __repr__(self) -> str:
        return str(self.number)

    def __bool__(self) -> bool:
        return self.number > 2

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.number


class Shown(Amount):
    """Formatted by ``__str__`` alone."""

    __format__ = object.__format__


class Lazy:
    """Computes a number once, when it is first read."""

    def __init__(self, number: int) -> None:
        self.number = number

    @functools.cached_property
    def twice(self) -> int:
        return self.number * 2


def added(amount: Any) -> Any:
    amount += 1
    return amount


READS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + 1,
    "reflected -": lambda a, b: 9 - a,
    "+=": lambda a, b: added(a),
    "@": lambda a, b: a @ 2,
    "-": lambda a, b: -a,
    "~": lambda a, b: ~a,
    "abs": lambda a, b: abs(a),
    "<": lambda a, b: 2 if a < 3 else 7,
    "> reflected": lambda a, b: 2 if a < 3 else 7,
    "chained": lambda a, b: 2 if b.number >= 1 and a < 3 < 4 else 7,
    "==": lambda a, b: 2 if a == b else 7,
    "!=": lambda a, b: 2 if a != b else 7,
    "in a list": lambda a, b: 2 if a in [b] else 7,
    "in a tuple": lambda a, b: 2 if a in (5, b) else 7,
    "not in": lambda a, b: 2 if a not in [b] else 7,
    "key of a dict": lambda a, b: {b: 5.0}.get(a, 6.0),
    "item of a dict": lambda a, b: {b: 5.0}[a] if a == b else 4.0,
    "in a dict": lambda a, b: 2 if a in {b: 1} else 7,
    "in a set": lambda a, b: 2 if a in {b} else 7,
    "float": lambda a, b: float(a),
    "int": lambda a, b: int(a),
    "round": lambda a, b: round(a),
    "math.ceil": lambda a, b: math.ceil(a),
    "math.sqrt": lambda a, b: math.sqrt(a),
    "operator.add": lambda a, b: operator.add(a, 1),
    "operator.index": lambda a, b: operator.index(a),
    "index": lambda a, b: [1.0, 2.0, 3.0, 4.0, 5.0][a],
    "slice": lambda a, b: sum([1.0, 2.0, 3.0, 4.0, 5.0][:a]),
    "range": lambda a, b: len(range(a)),
    "f-string": lambda a, b: float(f"{a}"),
    "f-string of str": lambda a, b: float(f"{a!s}"),
    "str": lambda a, b: float(str(a)),
    "repr": lambda a, b: float(repr(a)),
    "format": lambda a, b: float("{}".format(a)),  # noqa: UP032
    "percent": lambda a, b: float("%s" % a),  # noqa: UP031
    "bool": lambda a, b: 2 if a else 7,
    "any": lambda a, b: 2 if any([a]) else 7,
    "min": lambda a, b: 2 if min([a, b]) is a else 7,
    "sorted": lambda a, b: 2 if sorted([b, a])[0] is a else 7,
    "list.index": lambda a, b: [7, b, a].index(a),
    "list.count": lambda a, b: [b, 7].count(a),
}


class Holding(nn.Module):
    """Multiplies by what is read of two objects."""

    def __init__(self, read: Callable[[Any, Any], Any], cls: type) -> None:
        super().__init__()
        self.proj, self.read = nn.Linear(4, 4), read
        self.a, self.b = cls(2), cls(2)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x)) * self.read(self.a, self.b)


def _as_untouched(module: Holding, changes: list[Callable[[Holding], Any]]) -> None:
    twin, x = copy.deepcopy(module), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, x, cost_guard=False)
        assert report.applied or report.select(status="skipped")
        torch.testing.assert_close(module(x), twin(x))
        for change in changes:
            change(module), change(twin)
            torch.testing.assert_close(module(x), twin(x))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cls", [Amount, Shown])
@pytest.mark.parametrize("name", READS)
def test_what_an_operator_reads_is_guarded(name: str, cls: type) -> None:
    _as_untouched(Holding(READS[name], cls).eval(), [lambda m: setattr(m.a, "number", 3)])


@pytest.mark.parametrize("name", ["+", "<", "float", "f-string", "=="])
def test_an_operator_that_is_replaced_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(module: Holding) -> None:
        methods = {"+": "__add__", "<": "__lt__", "float": "__float__", "f-string": "__format__", "==": "__eq__"}
        results = {"+": 8, "<": False, "float": 8.0, "f-string": "8", "==": False}
        monkeypatch.setattr(Amount, methods[name], lambda self, *_: results[name])

    _as_untouched(Holding(READS[name], Amount).eval(), [replaced])


@pytest.mark.parametrize("held", [False, True], ids=["new", "held"])
def test_a_property_that_is_computed_once(held: bool) -> None:
    module = Holding(lambda a, b: a.twice, Lazy).eval()
    if held:
        assert module.a.twice == 4
    _as_untouched(module, [lambda m: setattr(m.a, "number", 3), lambda m: vars(m.a).pop("twice", None)])
