"""State that a submodule or a hook changes during a call, not in the recorded one: read afterwards, it is an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import install
from schedule.util.errors import ScheduleError
from tests.adversary.changing import (
    CHANGES,
    OUTSIDE,
    Child,
    Read,
    nothing,
    of_attribute,
    of_class,
    of_global,
    put_back,
    resize_table,
    running_graphs,
    set_attribute,
    set_class,
    set_global,
    set_global_by_name,
    traced,
)
from tests.needs import needs_torch

CHANGED = "code that the forward calls has (changed|replaced) it"


@pytest.fixture(autouse=True)
def _outside() -> Iterator[None]:
    yield
    put_back()


@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_a_change_that_is_read_afterwards_is_an_error(read: Read, change: Callable[[Any], None], by_hook: bool) -> None:
    module, _, x = traced(nothing, read)
    if by_hook:
        handle = module.child.proj.register_forward_hook(lambda *_: change(module))
    else:
        module.child.change = change
    with pytest.raises(ScheduleError, match=f"changed while child ran.*Parent reads it afterwards|{CHANGED}"):
        module(x)
    if by_hook:
        handle.remove()


@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_what_is_read_again_counts(read: Read, change: Callable[[Any], None]) -> None:
    module, _, x = traced(read, read)
    module.child.change = change
    with pytest.raises(ScheduleError, match=f"changed while child ran|{CHANGED}"):
        module(x)


@pytest.mark.parametrize(("read", "change"), CHANGES)
def test_a_change_of_what_was_read_before_is_as_untouched(read: Read, change: Callable[[Any], None]) -> None:
    module, twin, x = traced(read, nothing)
    for each in (twin, module):
        each.child.change = change
    expected = twin(x)
    put_back()
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("rules", ["default", "all"])
def test_a_fused_call_hands_its_check_on(rules: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.fc1, self.fc2, self.gain = Child([self]), nn.Linear(4, 8), nn.Linear(8, 4), 2.0

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc1(self.child(x))
            return self.fc2(torch.nn.functional.gelu(y)) * self.gain

    module, x = Block(), torch.randn(2, 4)
    report = schedule.optimize(module, (x,), rules=rules, cost_guard=False)
    assert report.applied
    module(x)
    module.child.change = set_attribute
    with pytest.raises(ScheduleError, match="changed while"):
        module(x)


def test_copies_and_pickles_check_too() -> None:
    module, _, x = traced(nothing, of_attribute)
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        each.child.change = set_attribute
        with pytest.raises(ScheduleError, match="changed while child ran"):
            each(x)


def replace_weight(m: Any) -> None:
    m.weight = nn.Parameter(torch.full((4,), 9.0))


def replace_buffer(m: Any) -> None:
    m.register_buffer("buffer", torch.full((4,), 9.0))


class Reader(nn.Module):
    """A forward that reads a tensor before and behind the call of its child, as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.child = how, Child([self])
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("buffer", torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "held":  # the tensors of before the call
            weight, buffer = self.weight, self.buffer
            return self.child(x) * weight + buffer
        if self.how == "again":
            y = x * self.weight + self.buffer
            return self.child(y) * self.weight + self.buffer
        if self.how == "both":
            weight, buffer = self.weight, self.buffer
            return self.child(x) * weight + self.weight * buffer + self.buffer
        return self.child(x) * self.weight + self.buffer


@pytest.mark.parametrize("change", [replace_weight, replace_buffer])
@pytest.mark.parametrize("how", ["held", "again", "both", "behind"])
@pytest.mark.parametrize("flatten", [False, True])
def test_tensors_are_read_where_the_forward_reads_them(how: str, change: Callable[[Any], None], flatten: bool) -> None:
    module, x = Reader(how), torch.randn(2, 4)
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, (x,))
    sch.trace(flatten=flatten, leaves=("child",) if flatten else ())
    install(module, sch.specializations)
    torch.testing.assert_close(module(x), twin(x))
    for each in (module, twin):
        each.child.change = change
    if how in ("again", "both"):
        with pytest.raises(ScheduleError, match=r"self\.\w+ is another object than the graph"):
            module(x)
    else:
        torch.testing.assert_close(module(x), twin(x))


class Assigning(nn.Module):
    """A forward that reads back what it assigned, behind the call of its child."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.child, self.kept, self.plain = Child([self]), None, plain

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.shape[0] if self.plain else x * 2
        y = self.child(x)
        return y * self.kept


def assign(m: Any) -> None:
    m.kept = 7


@pytest.mark.parametrize("plain", [False, True])
def test_an_assigned_attribute_is_read_back(plain: bool) -> None:
    module = Assigning(plain)
    twin, x = running_graphs(module)
    torch.testing.assert_close(module(x), twin(x))
    module.child.change = assign
    with pytest.raises(ScheduleError, match=r"self\.kept (changed while|is another object)"):
        module(x)


MISSED_BY_TORCH = (set_global, resize_table)  # an untouched model, compiled, computes with the old value too
BY_COMPILED_CODE = [each for each in CHANGES if each[1] not in MISSED_BY_TORCH]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("read", "change"), [*BY_COMPILED_CODE, (of_global, set_global_by_name)])
@pytest.mark.parametrize("early", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_code_notices_too(read: Read, change: Callable[[Any], None], early: bool) -> None:
    module, twin, x = traced(nothing, read)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), twin(x))
    compiled = torch.compile(module, backend="eager")
    if early:
        torch.testing.assert_close(compiled(x), twin(x))
    module.child.change = change
    with pytest.raises(ScheduleError, match=f"changed while child ran|{CHANGED}"):
        compiled(x)


# An untouched model, compiled at one value of an attribute of a class, computes with it for good.
_OF_CLASS = needs_torch("2.13", "no guards on attributes of classes in compiled code")


@pytest.mark.parametrize(
    ("read", "change"),
    [pytest.param(*each, marks=_OF_CLASS if each == (of_class, set_class) else ()) for each in OUTSIDE],
)
def test_compiled_code_sees_changes_between_calls(read: Read, change: Callable[[Any], None]) -> None:
    module, twin, x = traced(read, read)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), twin(x))
    change(module)
    expected = twin(x)
    torch.testing.assert_close(compiled(x), expected)
    put_back()
    torch.testing.assert_close(compiled(x), twin(x))


@pytest.mark.parametrize("how", ["held", "again", "both", "behind"])
def test_compiled_code_reads_tensors_where_the_forward_does(how: str) -> None:
    module = Reader(how)
    twin, x = running_graphs(module)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), twin(x))
