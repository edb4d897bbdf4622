"""A value read by a forward, wherever it comes from and whatever is done with it, is of another class in a later call.

The product of sources and uses: a number of an object, a container, a dataclass, a method or a submodule is branched
on, compared, shown, indexed with, multiplied; then it is None, a truth value, a fraction, a text, a list, a tensor. It
changes before a call, or during one, by a submodule.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of
from schedule.util.errors import ScheduleError

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = 2
LATER: list[Any] = [None, 0, 1, 3, 2.0, -0.0, float("nan"), "x", True, False, (1,), [1], torch.tensor(2.0)]
LATER += [torch.tensor(2), np.int64(2), np.float32(2), FIRST]


class Held:
    """An object that holds one value in many ways."""

    def __init__(self, value: Any) -> None:
        self.set(value)

    def set(self, value: Any) -> None:
        """Hold another value."""
        self.value, self.items, self.table, self.pair = value, [value, 1], {"a": value}, (value, 1)
        self.part = types.SimpleNamespace(value=value)

    def give(self) -> Any:
        """Return the value."""
        return self.value

    def get_value(self) -> Any:
        """Return the value, by the name of a question."""
        return self.value

    def both(self) -> tuple[Any, int]:
        """Return the value and a number."""
        return self.value, 1

    @property
    def shown(self) -> Any:
        """The value."""
        return self.value

    def __getitem__(self, index: int) -> Any:
        return self.value


@dataclasses.dataclass
class Record:
    """A dataclass that holds the value."""

    value: Any = None
    items: Any = None


class Returning(nn.Module):
    """A submodule that returns the value in a container."""

    def __init__(self, pack: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.pack, self.value = pack, FIRST

    def forward(self, x: Tensor) -> Any:
        return self.pack(x, self.value)


KEPT = object()


class Changing(nn.Module):
    """A submodule that may change what is around it."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owners, self.to = [owner], KEPT

    def forward(self, x: Tensor, held: Held, given: dict[str, Any]) -> Tensor:
        if self.to is not KEPT:
            held.set(self.to)
            given["a"], given["b"][0], given["r"].value, given["r"].items[0] = (self.to,) * 4
            self.owners[0].hold(self.to)
        return x + 1


SOURCES: dict[str, Callable[[Any, Tensor, Any, Any], Any]] = {
    "attribute": lambda m, h, held, given: m.value,
    "object": lambda m, h, held, given: held.value,
    "object by getattr": lambda m, h, held, given: getattr(held, "value", 5),
    "list": lambda m, h, held, given: held.items[0],
    "list by iter": lambda m, h, held, given: next(iter(held.items)),
    "dict": lambda m, h, held, given: held.table["a"],
    "dict by get": lambda m, h, held, given: held.table.get("a"),
    "dict by values": lambda m, h, held, given: next(iter(held.table.values())),
    "dict by items": lambda m, h, held, given: [value for _, value in held.table.items()][0],  # noqa: RUF015
    "part": lambda m, h, held, given: held.part.value,
    "tuple": lambda m, h, held, given: held.pair[0],
    "tuple, unpacked": lambda m, h, held, given: (lambda a, b: a)(*held.pair),
    "method": lambda m, h, held, given: held.give(),
    "question": lambda m, h, held, given: held.get_value(),
    "method, of a pair": lambda m, h, held, given: held.both()[0],
    "property": lambda m, h, held, given: held.shown,
    "item by a method": lambda m, h, held, given: held[0],
    "submodule": lambda m, h, held, given: m.as_tuple(h)[1],
    "submodule, in a list": lambda m, h, held, given: m.as_list(h)[1],
    "submodule, in a dict": lambda m, h, held, given: m.as_dict(h)["k"],
    "submodule, in a dataclass": lambda m, h, held, given: m.as_record(h).value,
    "argument's dict": lambda m, h, held, given: given["a"],
    "argument's list": lambda m, h, held, given: given["b"][0],
    "argument's dataclass": lambda m, h, held, given: given["r"].value,
    "list of an argument's dataclass": lambda m, h, held, given: given["r"].items[0],
}


def _matched(value: Any) -> float:
    if value is None:
        return 2.0
    kinds = {bool: 3.0, int: 4.0, float: 5.0, str: 6.0}
    return next((number for kind, number in kinds.items() if isinstance(value, kind)), 7.0)


def _if(answer: Any) -> float:
    return 0.5 if answer else 0.25


INTEGERS = torch.ones(2, dtype=torch.int32)
USES: dict[str, Callable[[Tensor, Any], Any]] = {
    "truth": lambda h, v: h * _if(v),
    "not": lambda h, v: h * _if(not v),
    "and": lambda h, v: h * ((v and 2) or 3),
    "is not equal": lambda h, v: h * _if(v != 3),
    "is equal": lambda h, v: h * _if(v == 2),
    "is None": lambda h, v: h * _if(v is None),
    "isinstance int": lambda h, v: h * _if(isinstance(v, int)),
    "isinstance of two": lambda h, v: h * _if(isinstance(v, (int, float))),
    "isinstance tensor": lambda h, v: h * _if(isinstance(v, torch.Tensor)),
    "type": lambda h, v: h * _if(type(v) is int),
    "is_tensor": lambda h, v: h * _if(torch.is_tensor(v)),
    "callable": lambda h, v: h * _if(callable(v)),
    "hasattr": lambda h, v: h * _if(hasattr(v, "real")),
    "str": lambda h, v: h * len(str(v)),
    "text": lambda h, v: h * len(f"{v}-{v!r}"),
    "in": lambda h, v: h * _if(v in (1, 2, None)),
    "key": lambda h, v: h * {1: 2.0, 2: 3.0, None: 4.0, "x": 5.0}.get(v, 6.0),
    "set": lambda h, v: h * len({v, 2}),
    "first of its kinds": lambda h, v: h * _matched(v),
    "dtype made": lambda h, v: h * _if(torch.full((2,), v).dtype is torch.int64),
    "dtype of a product": lambda h, v: h * _if((INTEGERS * v).dtype is torch.int32),
    "tensor": lambda h, v: h * torch.tensor(v),
    "product": lambda h, v: h * v,
    "slice": lambda h, v: h[..., :v].sum(-1, keepdim=True) + h,
    "shape": lambda h, v: h.reshape(v, -1).sum() * h,
    "size": lambda h, v: h + torch.zeros(v, 8).sum(),
    "range": lambda h, v: h * sum(range(v)),
    "int": lambda h, v: h * int(v),
    "float": lambda h, v: h * float(v),
    "max": lambda h, v: h * max(v, 2),
    "dimension": lambda h, v: h.sum(v - 2, keepdim=True) + h,
    "keyword": lambda h, v: torch.add(h, h, alpha=v),
    "where": lambda h, v: torch.where(torch.tensor(True), h, v),
    "difference": lambda h, v: h * _if(v - v == 0),
    "sign": lambda h, v: h * _if(str(v * 1.0).startswith("-")),
}


class Reading(nn.Module):
    """A forward that uses the value of a source, before and behind a submodule that may change it."""

    def __init__(self, source: str, use: str) -> None:
        super().__init__()
        self.proj, self.read, self.use = nn.Linear(8, 8), SOURCES[source], USES[use]
        self.as_tuple, self.as_list = Returning(lambda x, v: (x, v)), Returning(lambda x, v: [x, v])
        self.as_dict, self.as_record = Returning(lambda x, v: {"y": x, "k": v}), Returning(lambda x, v: Record(v, x))
        self.value: Any = FIRST
        self.changing = Changing(self)

    def hold(self, value: Any) -> None:
        """Hold another value."""
        self.value = value
        for child in (self.as_tuple, self.as_list, self.as_dict, self.as_record):
            child.value = value

    def forward(self, x: Tensor, held: Held, given: dict[str, Any]) -> Tensor:
        h = F.gelu(self.proj(x))
        before = self.use(h, self.read(self, h, held, given))
        h = self.changing(h, held, given)
        return before + self.use(h, self.read(self, h, held, given))  # type: ignore[no-any-return]


_OF_OPERATIONS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What operations say of a wrong value."""


def _called(module: Reading, x: Tensor, before: Any, during: Any = KEPT) -> Any:
    module.hold(before)
    module.changing.to = during
    given = {"a": before, "b": [before], "r": Record(before, [before])}
    try:
        return module(x, Held(before), given)
    except ScheduleError:
        raise
    except _OF_OPERATIONS as error:
        return error


def _compared(source: str, use: str) -> None:
    """Compare a scheduled model with an untouched one, unless the graph is refused."""
    torch.manual_seed(0)
    module, x = Reading(source, use), torch.randn(2, 8)
    twin = copy.deepcopy(module)
    if isinstance(_called(twin, x, FIRST), Exception):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"a": FIRST, "b": [FIRST], "r": Record(FIRST, [FIRST])}
        report = schedule.optimize(module, (x, Held(FIRST), given), cost_guard=False)
    if not report.applied:
        return
    torch.testing.assert_close(_called(module, x, FIRST), _called(twin, x, FIRST))
    state = state_of(module)
    assert state is not None and not state.fallbacks, "the graph holds where nothing has changed"
    for value in LATER:
        for before, during in ((value, KEPT), (FIRST, value)):
            expected = _called(twin, x, before, during)
            try:
                ours = _called(module, x, before, during)
            except ScheduleError:
                assert during is not KEPT or isinstance(expected, Exception), (value, expected)
                continue
            where = f"{value!r} {'before' if during is KEPT else 'during'} the call"
            if isinstance(expected, Exception):
                assert isinstance(ours, Exception), where
            else:
                assert isinstance(ours, Tensor), f"{where}: {ours!r}"
                torch.testing.assert_close(ours, expected, equal_nan=True, msg=lambda text, at=where: f"{at}: {text}")


PAIRS = [(source, use) for source in SOURCES for use in USES]
QUICK = {pair for number, pair in enumerate(PAIRS) if number % 7 == 0}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("source", "use"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS]
)
def test_a_value_of_another_class(source: str, use: str) -> None:
    _compared(source, use)


def test_the_comparison_is_not_empty() -> None:
    """Most graphs are made, and hold for the recorded value."""
    made = 0
    for use in USES:
        module, x = Reading("object", use), torch.randn(2, 8)
        given = {"a": FIRST, "b": [FIRST], "r": Record(FIRST, [FIRST])}
        report = schedule.optimize(module, (x, Held(FIRST), given), cost_guard=False)
        made += bool(report.applied)
    assert made >= len(USES) - 3
