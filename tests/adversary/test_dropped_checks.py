"""Mutation tests of the checks in graphs: without any one kind of them, a call that it is for goes wrong."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.capture.effects import effects
from schedule.capture.specializing import specialization
from schedule.util.errors import ScheduleError

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
CAPTURE = "schedule.capture"


class Given:
    """An object with a list, and a method that changes it and returns a tuple."""

    def __init__(self) -> None:
        self.items, self.calls, self.extra = [3, 2], 0, False

    def take(self) -> tuple[int, ...]:
        """Count the call, and return two numbers, or three."""
        self.calls += 1
        return (1, 2, 3) if self.extra else (1, 2)


class Child(nn.Module):
    """A submodule that may change what it is given or its parent, or return something else."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.linear, self.parents, self.change, self.other = nn.Linear(8, 8), [parent], None, None

    def forward(self, x: Tensor, given: Any = None) -> Any:
        if self.change is not None:
            self.change(self.parents[0], given)
        return self.linear(x) if self.other is None else self.other(x)


Body = Callable[[Any, Tensor, Any], Any]


class Parent(nn.Module):
    """A forward with a part to fuse, and a part of its own."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.last, self.gain, self.body = nn.Linear(8, 8), nn.Linear(8, 8), 2.0, body
        self.child = Child(self)
        self.register_buffer("threshold", torch.tensor(-100.0))

    def forward(self, x: Tensor, given: Any) -> Any:
        return self.body(self, F.gelu(self.first(x)), given)


def branching(m: Any, h: Tensor, given: Any) -> Any:
    return h * 2 if h.sum() > m.threshold else h * 3


def asking_for_gradients(m: Any, h: Tensor, given: Any) -> Any:
    return m.child(h) * (2.0 if m.last.weight.requires_grad else 3.0)


def reading_twice(m: Any, h: Tensor, given: Any) -> Any:
    h = h * m.last.bias
    return m.child(h) * m.last.bias


def reading_a_number(m: Any, h: Tensor, given: Any) -> Any:
    return m.child(h) * m.gain


def unpacking(m: Any, h: Tensor, given: Any) -> Any:
    found = m.child(h)
    return found[0] * 2 if isinstance(found, tuple) and found[1] is None else h


def asking_for_a_dtype(m: Any, h: Tensor, given: Any) -> Any:
    return h * (2.0 if m.child(h).dtype is torch.float32 else 3.0)


def asking_for_none(m: Any, h: Tensor, given: Any) -> Any:
    return h * 2 if m.child(h) is None else h * 3


def counting(m: Any, h: Tensor, given: Any) -> Any:
    return h * len(given.take())


def handing_a_list_on(m: Any, h: Tensor, given: Any) -> Any:
    values = [1.0, 2.0]
    return m.child(h, values) * values[0]


def reading_a_list_again(m: Any, h: Tensor, given: Any) -> Any:
    items = given.items
    return m.child(h, given) * sum(items)


def assigning_a_list(m: Any, h: Tensor, given: Any) -> Any:
    m.kept = [1.0, 2.0]
    m.kept[1] = 3.0
    return m.child(h) * m.kept[0]


def reading_what_was_returned(m: Any, h: Tensor, given: Any) -> Any:
    found = m.child(h)
    return m.child(h)[1] * found[0]


_KEPT: list[Any] = [None]


def _returning_what_is_kept(m: Any, given: Any) -> None:
    def other(x: Tensor) -> Any:
        _KEPT[0] = [x, x * 2]
        return _KEPT[0]

    m.child.other = other


def _change_kept(m: Any, given: Any) -> None:
    _KEPT[0][0] = _KEPT[0][1]


def _changing(change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    return lambda m, given: setattr(m.child, "change", change)


def _returning(other: Callable[[Tensor], Any]) -> Callable[[Any, Any], None]:
    return lambda m, given: setattr(m.child, "other", other)


def _nothing(m: Any, given: Any) -> None:
    """Change nothing."""


def _set_first(m: Any, given: Any) -> None:
    (given if isinstance(given, list) else given.items)[0] = 7


def _change_assigned(m: Any, given: Any) -> None:
    m.kept[0] = 7.0


def _replaced(m: Any, given: Any) -> None:
    m.last.bias = nn.Parameter(torch.full((8,), 3.0))


CASES: dict[str, tuple[Body, Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "specializing.conditions.check": (branching, _nothing, lambda m, given: m.threshold.fill_(100.0)),
    "specializing.conditions.check_still": (
        asking_for_gradients,
        _nothing,
        _changing(lambda m, given: m.last.weight.requires_grad_(False)),
    ),
    "effects.later_reads.check_same": (reading_twice, _nothing, _changing(_replaced)),
    "effects.later_reads.StateCheck": (reading_a_number, _nothing, _changing(lambda m, given: setattr(m, "gain", 5.0))),
    "specializing.output_checks.check_output": (
        unpacking,
        _returning(lambda x: (x, None)),
        _returning(lambda x: (x, x)),
    ),
    "effects.result_kinds.check_kind": (asking_for_a_dtype, _nothing, _returning(lambda x: x.half())),
    "effects.result_kinds.check_none": (asking_for_none, _returning(lambda x: None), _returning(lambda x: x)),
    "effects.result_kinds.check_length": (counting, _nothing, lambda m, given: setattr(given, "extra", True)),
    "graph.escaped_containers.check_contents": (handing_a_list_on, _nothing, _changing(_set_first)),
    "tracing.results.check_returned": (
        reading_what_was_returned,
        _returning_what_is_kept,
        _changing(_change_kept),
    ),
    "python.assignments.check_items": (assigning_a_list, _nothing, _changing(_change_assigned)),
    "effects.object_containers.check_items": (reading_a_list_again, _nothing, _changing(_set_first)),
}


def _is_wrong(name: str) -> bool:
    """Whether a call after the change is silently another one than the original's."""
    torch.manual_seed(0)
    body, prepare, change = CASES[name]
    module, x = Parent(body), torch.ones(2, 8)
    prepare(module, None)
    twin = copy.deepcopy(module)
    schedule.optimize(module, (x, Given()), cost_guard=False)
    torch.testing.assert_close(module(x, Given()), twin(x, Given()))
    results = []
    for each in (twin, module):
        given = Given()
        change(each, given)
        try:
            results.append(each(x, given))
        except ScheduleError:
            return False
    return results[0].dtype != results[1].dtype or not torch.allclose(*results, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_with_the_check_no_call_is_wrong(name: str) -> None:
    assert not _is_wrong(name)


@pytest.mark.parametrize("name", CASES)
def test_without_it_a_call_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialization, "_functions", weakref.WeakValueDictionary())  # of like graphs, with the check
    module, _, function = name.rpartition(".")
    owner: Any = importlib.import_module(f"{CAPTURE}.{module}")
    if isinstance(getattr(owner, function), type):
        monkeypatch.setattr(getattr(owner, function), "__call__", lambda *_: None)
    else:
        original = getattr(owner, function)
        dropped = functools.wraps(original)(lambda *_: None)
        if effects.is_check(original):
            monkeypatch.setattr(effects, "_CHECKS", effects._CHECKS | {dropped})
        for other in [module for name, module in sys.modules.items() if name.startswith(CAPTURE)]:
            if getattr(other, function, None) is original:
                monkeypatch.setattr(other, function, dropped)
    assert _is_wrong(name)


def test_every_check_in_graphs_has_a_case() -> None:
    functions = {
        getattr(importlib.import_module(f"{CAPTURE}.{m}"), f) for m, _, f in (n.rpartition(".") for n in CASES)
    }
    assert {each for each in effects._CHECKS if each.__module__.startswith(CAPTURE)} <= functions
