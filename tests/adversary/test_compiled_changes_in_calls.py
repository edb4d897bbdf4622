"""What code changes in a compiled call, compared with an untouched model, compiled: the same result, or an error."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedule.util.errors import ScheduleError
from tests.adversary.changing import Child, running_graphs

NAMES = {f"name {index}" for index in range(100)}
FROZEN = frozenset(NAMES)


class Key:
    """An entry of a set."""


CLASSES = {type(f"Class{index}", (), {}) for index in range(100)}


class Reader(nn.Module):
    """Reads state outside of modules, after its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child([self])

    def tail(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        early = F.gelu(x) + torch.cos(x) * math.floor(2.5)
        y = self.tail(self.child(x))
        factor = (2 if "new" in NAMES else 3) + (4 if Key in CLASSES else 5) + (6 if "new" in FROZEN else 7)
        return (F.gelu(y) + torch.cos(y) * math.floor(2.5)) * factor + early


class Caller(nn.Module):
    """Runs a child before a module that reads state outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.reader = Child([self]), Reader()

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.child(x))


def change_method(_: Any) -> None:
    Reader.tail = lambda self, x: x + 1  # type: ignore[method-assign]


def change_function_of_torch(_: Any) -> None:
    F.gelu = F.relu


def change_operator_of_torch(_: Any) -> None:
    torch.cos = torch.sin


def change_standard_library(_: Any) -> None:
    math.floor = math.ceil


def add_to_large_set(_: Any) -> None:
    NAMES.add("new")


def replace_large_set(_: Any) -> None:
    sys.modules[__name__].FROZEN = FROZEN | {"new"}  # type: ignore[attr-defined]


CHANGES = [
    change_method,
    change_function_of_torch,
    change_operator_of_torch,
    change_standard_library,
    add_to_large_set,
    replace_large_set,
]


def _restoring() -> Callable[[], None]:
    tail, gelu, cos, floor, frozen = Reader.tail, F.gelu, torch.cos, math.floor, FROZEN

    def restore() -> None:
        Reader.tail, F.gelu, torch.cos, math.floor = tail, gelu, cos, floor  # type: ignore[method-assign]
        NAMES.discard("new")
        CLASSES.discard(Key)
        sys.modules[__name__].FROZEN = frozen  # type: ignore[attr-defined]

    return restore


restore = _restoring()


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    restore()


def compiled(module: Any, change: Callable[[Any], None], early: bool, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    run = torch.compile(module, backend="eager")
    if early:
        run(x)
    module.child.change = change
    try:
        return run(x)
    finally:
        restore()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_behind_the_check_of_the_call_is_seen(change: Callable[[Any], None], early: bool) -> None:
    module = Reader()
    original, x = running_graphs(module)
    expected = compiled(original, change, early, x)
    try:
        result = compiled(module, change, early, x)
    except ScheduleError:
        return
    torch.testing.assert_close(result, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("change", CHANGES[1:])  # torch.compile itself does not see the method
def test_a_change_before_a_module_makes_it_run_its_original_forward(change: Callable[[Any], None], early: bool) -> None:
    module = Caller()
    original = copy.deepcopy(module)
    _, x = running_graphs(module.reader)
    torch.testing.assert_close(compiled(module, change, early, x), compiled(original, change, early, x))


def test_changes_of_other_state_are_no_reason() -> None:
    module = Reader()
    original, x = running_graphs(module)

    def change(_: Any) -> None:
        F.other = 1  # type: ignore[attr-defined]

    try:
        torch.testing.assert_close(compiled(module, change, False, x), compiled(original, change, False, x))
    finally:
        del F.other  # type: ignore[attr-defined]


def test_a_compiled_graph_runs_without_changes() -> None:
    module = Reader()
    twin, x = running_graphs(module)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), twin(x))
