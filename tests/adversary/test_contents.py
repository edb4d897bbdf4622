"""Contents that a forward reads by handing them on: to containers of its own, to an index, to descriptors."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule


class Twice:
    """Descriptor with a value of its own."""

    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, owner: Any, cls: type) -> float:
        return self.value if owner is None else 2 * self.value


class Meta(type):
    @property
    def level(cls) -> float:
        return float(cls.__dict__["_level"])


class Settings(metaclass=Meta):
    _level = 2.0
    twice = Twice()


class Held:
    def __init__(self) -> None:
        def function(a: float = 2.0, *, b: float = 3.0) -> float:
            return a * b

        function.tag = 2.0  # type: ignore[attr-defined]
        self.function: Any = function
        self.list = [1, 2, 3]
        self.dict = {"a": 2.0}
        self.rows = ([0, 1],)


class Reading(nn.Module):
    """Scales an activation by what ``read`` finds in ``held``."""

    def __init__(self, held: Held, read: Callable[[Held], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.fc(x))
        factor: Any = self.read(self.held)
        return y * factor


def extended(held: Held) -> float:
    numbers = [1.0]
    numbers.extend(held.list)
    return sum(numbers)


def sliced(held: Held) -> float:
    numbers = [1.0]
    numbers[0:1] = held.list
    return float(sum(numbers))


def added(held: Held) -> float:
    numbers = [1.0]
    numbers += held.list
    return sum(numbers)


def queued(held: Held) -> float:
    numbers = collections.deque([1.0])
    numbers.extend(held.list)
    return sum(numbers)


def united(held: Held) -> int:
    return len({1}.union(held.list))


def updated(held: Held) -> float:
    entries = {"a": 1.0}
    entries.update(held.dict)
    return entries["a"]


def updated_set(held: Held) -> int:
    numbers = {1}
    numbers.update(held.list)
    return len(numbers)


def set_by_list(held: Held) -> Tensor:
    made = torch.zeros(60)
    made[held.list] = 1.0
    return made.sum()


def append(held: Held) -> None:
    held.list.append(7)


def set_default(held: Held) -> None:
    held.function.__defaults__ = (9.0,)


def set_keyword_default(held: Held) -> None:
    held.function.__kwdefaults__ = {"b": 9.0}


def set_tag(held: Held) -> None:
    held.function.tag = 9.0


def set_entry(held: Held) -> None:
    held.dict["a"] = 9.0


def set_row(held: Held) -> None:
    held.rows[0].append(2)


def set_level(held: Held) -> None:
    Settings._level = 9.0


def set_twice(held: Held) -> None:
    Settings.__dict__["twice"].value = 9.0


CASES: dict[str, tuple[Callable[[Held], Any], Callable[[Held], None]]] = {
    "extended list": (extended, append),
    "slice of a list": (sliced, append),
    "added list": (added, append),
    "extended deque": (queued, append),
    "union": (united, append),
    "updated set": (updated_set, append),
    "updated dict": (updated, set_entry),
    "index of a tensor": (lambda held: torch.arange(60.0)[held.list].sum(), append),
    "index of columns": (lambda held: torch.arange(120.0).view(2, 60)[:, held.list].sum(), append),
    "index by a tuple": (lambda held: torch.arange(60.0)[held.rows].sum(), set_row),
    "items set by a list": (set_by_list, append),
    "default of a function": (lambda held: held.function.__defaults__[0], set_default),
    "keyword default": (lambda held: held.function.__kwdefaults__["b"], set_keyword_default),
    "attribute of a function": (lambda held: held.function.tag, set_tag),
    "property of a metaclass": (lambda held: Settings.level, set_level),
    "descriptor by the class": (lambda held: Settings.twice, set_twice),
    "descriptor by an object": (lambda held: Settings().twice, set_twice),
}


@pytest.mark.parametrize("name", CASES)
def test_contents_that_are_handed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_level", 2.0)
    monkeypatch.setattr(Settings.__dict__["twice"], "value", 2.0)
    read, change = CASES[name]
    held, x = Held(), torch.randn(3, 8)
    model, twin = Reading(held, read), Reading(held, read)
    twin.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert schedule.optimize(model, x, cost_guard=False).applied
        torch.testing.assert_close(model(x), twin(x))
        before = twin(x)
        change(held)
        assert not torch.allclose(before, twin(x))
        torch.testing.assert_close(model(x), twin(x))
