"""Values that a model holds: attributes, truth, order, signs and iteration of objects that are not modules."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.adversary.readings import Box, Reading, as_untouched

pytestmark = pytest.mark.filterwarnings("ignore")
TABLE = {"k": 1.5}


class Text(str):
    """A string that can hold attributes."""


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "string with an attribute": (
        lambda: _with(Text("x"), gain=1.5),
        lambda m: m.held.gain,
        lambda m: setattr(m.held, "gain", 2.5),
    ),
    "object that is false": (lambda: Box(), lambda m: 2.0 if m.held else 1.0, lambda m: setattr(m, "held", False)),
    "module that is false": (
        lambda: nn.Tanh(),
        lambda m: 2.0 if m.held else 1.0,
        lambda m: setattr(m, "held", nn.Sequential()),
    ),
    "object that is True": (
        lambda: Box(),
        lambda m: 2.0 if m.held is True else 1.0,
        lambda m: setattr(m, "held", True),
    ),
    "object in a tuple": (
        lambda: nn.Tanh(),
        lambda m: 2.0 if m.held in (None, "x") else 1.0,
        lambda m: setattr(m, "held", None),
    ),
    "order of a set": (
        lambda: {0, 8},
        lambda m: functools.reduce(lambda a, k: a * 2.0 + k, m.held, 1.0),
        lambda m: setattr(m, "held", _ordered(8, 0)),
    ),
    "sign of zero": (
        lambda: np.float32(0.0),
        lambda m: math.copysign(1.0, float(m.held)),
        lambda m: setattr(m, "held", np.float32(-0.0)),
    ),
    "sign of an imaginary zero": (
        lambda: complex(1.0, 0.0),
        lambda m: math.copysign(1.0, m.held.imag),
        lambda m: setattr(m, "held", complex(1.0, -0.0)),
    ),
    "tensor that becomes a parameter": (
        lambda: [torch.tensor(1.5)],
        lambda m: 2.0 if isinstance(m.held[0], nn.Parameter) else 1.0,
        lambda m: m.held.__setitem__(0, nn.Parameter(torch.tensor(1.5))),
    ),
    "attribute of a tensor": (
        lambda: _with(torch.ones(2), gain=1.5),
        lambda m: getattr(m.held, "gain", 1.0),
        lambda m: setattr(m.held, "gain", 2.5),
    ),
    "__getitem__ alone": (lambda: Items(), lambda m: sum([*m.held], 0.0), lambda m: m.held.items.append(4.0)),
    "__getitem__ alone, searched": (
        lambda: Items(),
        lambda m: 2.0 if 4.0 in m.held else 1.0,
        lambda m: m.held.items.append(4.0),
    ),
    "iterator of its own": (lambda: Box(), lambda m: sum(Steps(m.held), 0.0), lambda m: setattr(m.held, "k", 3.0)),
    "reversed by its own method": (
        lambda: Items(),
        lambda m: functools.reduce(lambda a, k: a * k + 1.0, reversed(m.held), 1.0),
        lambda m: m.held.items.insert(0, 4.0),
    ),
    "protocol": (
        lambda: Box(),
        lambda m: 2.0 if isinstance(m.held, HasZ) else 1.0,
        lambda m: setattr(m.held, "z", 1.0),
    ),
    "what a dataclass does after its fields": (
        lambda: Box(),
        lambda m: Scaled(m.held).scaled,
        lambda m: setattr(m.held, "k", 3.0),
    ),
}


def _with(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def _ordered(*items: int) -> set[int]:
    made: set[int] = set()
    for item in items:
        made.add(item)
    return made


class Items:
    """A sequence that Python indexes, as it has no ``__iter__``."""

    def __init__(self) -> None:
        self.items = [1.5, 2.0]

    def __getitem__(self, index: int) -> float:
        return self.items[index]

    def __reversed__(self) -> Any:
        return iter(self.items[::-1])


class Steps:
    """An iterator over two numbers of an object."""

    def __init__(self, box: Box) -> None:
        self.box, self.step = box, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> float:
        self.step += 1
        if self.step > 2:
            raise StopIteration
        return self.box.k


@typing.runtime_checkable
class HasZ(typing.Protocol):
    z: float


@dataclasses.dataclass
class Scaled:
    box: Box
    factor: float = 2.0
    parts: list[float] = dataclasses.field(default_factory=lambda: [TABLE["k"]])

    def __post_init__(self) -> None:
        self.scaled = self.box.k * self.factor * self.parts[0]


@pytest.mark.parametrize("case", HELD)
def test_state_that_the_model_holds(case: str) -> None:
    make, read, change = HELD[case]
    module, twin = Reading(read), Reading(read)
    twin.load_state_dict(module.state_dict())
    module.held, twin.held = make(), make()  # type: ignore[assignment]
    as_untouched(module, change, twin=twin)
