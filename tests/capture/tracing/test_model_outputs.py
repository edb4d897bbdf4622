"""Dicts that are dataclasses, as transformers' outputs: the order of their items, and attributes without an item."""

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
from schedule.capture.recording.structure import map_structure


class EarlierOutput(ModelOutput):
    """As before transformers 5.24: an attribute that was None becomes no item."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self and value is not None:
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)


class LaterOutput(ModelOutput):
    """As from transformers 5.24 on: it becomes the last item."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {field.name for field in dataclasses.fields(self)} and value is not None:
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)


@dataclasses.dataclass
class Earlier(EarlierOutput):
    """Three fields."""

    last: Tensor | None = None
    pooled: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


@dataclasses.dataclass
class Later(LaterOutput):
    """Three fields."""

    last: Tensor | None = None
    pooled: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


@dataclasses.dataclass
class Bare(dict):  # type: ignore[type-arg]
    """A dict that is a dataclass, whose fields are no items."""

    last: Any = None
    pooled: Any = None
    states: Any = None


def set_pooled(output: Any, x: Tensor) -> None:
    output.pooled = x.mean(1)


def set_first_to_none(output: Any, x: Tensor) -> None:
    output.last = None


def base_of(output: Any) -> Any:
    """The class whose methods write an item without checks."""
    return dict if type(output) is Bare else OrderedDict


def move_to_the_end(output: Any, x: Tensor) -> None:
    moved = base_of(output).pop(output, "last")
    base_of(output).__setitem__(output, "last", moved)


def set_items_alone(output: Any, x: Tensor) -> None:
    base_of(output).__setitem__(output, "extra", x * 2)


def set_another_item(output: Any, x: Tensor) -> None:
    base_of(output).__setitem__(output, "last", x * 2)


CHANGES = [set_pooled, set_first_to_none, move_to_the_end, set_items_alone, set_another_item]


class Maker(nn.Module):
    """Returns an output that it has changed after making it."""

    def __init__(self, cls: type, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.cls, self.change = nn.Linear(4, 4), cls, change

    def forward(self, x: Tensor) -> Any:
        x = nn.functional.gelu(self.linear(x) + 1)
        output = self.cls(last=x, states=(x, x + 1))
        if self.cls is Bare:
            output["last"] = output.last
        self.change(output, x)
        return output


class Passing(nn.Module):
    """Hands on the output of its child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child, self.bias = child, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        output = self.child(x + self.bias)
        first = output[0] if isinstance(output, ModelOutput) else output.states[0]
        first = first[0] if isinstance(first, tuple) else first
        return {"output": output, "first": first + self.bias}


class Reading(nn.Module):
    """Reads an output that it was handed, after other code has run."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child, self.reader, self.other = child, Reader(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        output = self.child(x)
        y = self.reader(output)
        return y + self.other(y), output


class Reader(nn.Module):
    """Is handed an output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, output: Any) -> Tensor:
        total = self.linear(output.states[0])
        for value in output.values():
            if isinstance(value, Tensor) and value.dim() == 3:
                total = total * 0.5 + value
        return total if output.pooled is None else total + output.pooled[:, None]


def described(value: Any) -> Any:
    """All of an output but its numbers: classes, items in their order, attributes."""
    if isinstance(value, dict):
        attributes = sorted(vars(value).items()) if hasattr(value, "__dict__") else []
        return type(value), described([*value.items()]), described(attributes)
    if isinstance(value, (tuple, list)):
        return [described(each) for each in value]
    return tuple(value.shape) if isinstance(value, Tensor) else value


def numbers(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        attributes = sorted(vars(value).items()) if hasattr(value, "__dict__") else []
        return numbers([*value.values(), *[each for _, each in attributes]])
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in numbers(each)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.filterwarnings("error::schedule.FallbackWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("cls", [Earlier, Later, Bare])
@pytest.mark.parametrize("root", [None, Passing, Reading])
def test_outputs_changed_after_they_were_made(
    root: type[nn.Module] | None, cls: type, change: Callable[[Any, Tensor], None]
) -> None:
    torch.manual_seed(0)
    model: nn.Module = Maker(cls, change)
    model = model if root is None else root(model)
    twin = copy.deepcopy(model)
    schedule.create_schedule(model, torch.randn(2, 3, 4)).trace()
    for shape in [(2, 3, 4), (5, 7, 4)]:
        x = torch.randn(shape)
        found, expected = model(x), twin(x)
        assert described(found) == described(expected)
        torch.testing.assert_close(numbers(found), numbers(expected))


@pytest.mark.filterwarnings("error::schedule.FallbackWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("cls", [Earlier, Later, Bare])
def test_outputs_as_arguments(cls: type, change: Callable[[Any, Tensor], None]) -> None:
    torch.manual_seed(0)
    model, maker = Reader(), Maker(cls, change)
    twin = copy.deepcopy(model)
    schedule.create_schedule(model, (maker(torch.randn(2, 3, 4)),)).trace()
    given = maker(torch.randn(5, 7, 4))
    torch.testing.assert_close(model(given), twin(given))


@dataclasses.dataclass(slots=True)
class Slotted(dict):  # type: ignore[type-arg]
    """A dict that is a dataclass without a dict of attributes."""

    last: Any = None


def test_a_dataclass_with_slots_is_rebuilt() -> None:
    made = Slotted(last=1)
    made["item"] = 2
    rebuilt = map_structure(made, lambda leaf: leaf + 1)
    assert type(rebuilt) is Slotted and rebuilt.last == 2 and dict(rebuilt) == {"item": 3}
