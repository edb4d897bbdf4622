"""Lists, dicts and dataclasses that a forward hands to a submodule, which changes them in later calls only."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import schedule
from schedule.util.errors import ScheduleError


@dataclasses.dataclass
class Record:
    """A dataclass of one tensor."""

    x: Tensor | None = None


@dataclasses.dataclass
class Output(ModelOutput):
    """An output, as transformers has them: a dict and a dataclass."""

    x: Tensor | None = None


class Child(nn.Module):
    """A submodule that may change what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.change: Callable[[Any], None] | None = None

    def forward(self, x: Tensor, box: Any) -> Tensor:
        if self.change is not None:
            self.change(box)
        return self.proj(x)


class Given(nn.Module):
    """A forward that hands one of its arguments on, and reads it afterwards."""

    def __init__(self, make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.make, self.read, self.child = make, read, Child()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, box: Any) -> Tensor:
        y = self.child(x, box)
        return nn.functional.gelu(y + self.bias) + self.read(box)


class Made(Given):
    """A forward that makes what it hands on."""

    def forward(self, x: Tensor, box: Any) -> Tensor:
        made = self.make(x)
        y = self.child(x, made)
        return nn.functional.gelu(y + self.bias) + self.read(made)


def set_item(key: Any) -> Callable[[Any], None]:
    return lambda box: box.__setitem__(key, box[key] * 2)


def set_x(box: Any) -> None:
    box.x = box.x * 2


CASES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[[Any], None]]] = {
    "list": (lambda x: [x], lambda box: box[0], set_item(0)),
    "dict": (lambda x: {"x": x}, lambda box: box["x"], set_item("x")),
    "ordered dict": (lambda x: OrderedDict(x=x), lambda box: box["x"], set_item("x")),
    "output": (lambda x: Output(x=x), lambda box: box.x, set_x),
    "dataclass": (lambda x: Record(x), lambda box: box.x, set_x),
    "nested": (lambda x: {"x": ([x], 1)}, lambda box: box["x"][0][0], lambda box: set_item(0)(box["x"][0])),
    "number": (lambda x: [x, 2], lambda box: box[0] * box[1], set_item(1)),
    "length": (lambda x: [x], lambda box: box[0] * len(box), lambda box: box.append(None)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("model", [Given, Made])
def test_a_container_changed_in_a_later_call_is_an_error(model: type[Given], name: str) -> None:
    make, read, change = CASES[name]
    original = model(make, read)
    scheduled = copy.deepcopy(original)
    schedule.optimize(scheduled, (torch.randn(3, 4), make(torch.randn(3, 4))), cost_guard=False)
    x = torch.randn(5, 4)
    torch.testing.assert_close(scheduled(x, make(x)), original(x, make(x)))
    original.child.change = scheduled.child.change = change
    expected = original(x, make(x))
    try:
        actual = scheduled(x, make(x))
    except ScheduleError as error:
        assert "child changed a list or dict" in str(error)
    else:
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["list", "dict"])
def test_compiled_code_checks_too(name: str) -> None:
    make, read, change = CASES[name]
    model = Given(make, read)
    x = torch.randn(3, 4)
    schedule.optimize(model, (x, make(x)), cost_guard=False)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x, make(x)), model(x, make(x)))
    model.child.change = change
    with pytest.raises(ScheduleError, match="changed a list or dict"):
        compiled(x, make(x))


def test_the_graph_that_is_shown_has_no_checks() -> None:
    make, read, _ = CASES["dict"]
    x = torch.randn(3, 4)
    sch = schedule.create_schedule(Made(make, read), (x, make(x)))
    assert not any("contents" in node.name for node in sch.graph.nodes)
