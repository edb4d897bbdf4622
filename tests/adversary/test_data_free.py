"""No tensor without data outlives a trace, in any cache of the process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import schedule
from schedule.util.errors import ScheduleError

TABLES: dict[int, Tensor] = {}


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(float(size))


@functools.cache
def tables(size: int) -> dict[str, tuple[Tensor, ...]]:
    return {"both": (torch.ones(size), torch.zeros(size))}


@functools.cache
def through_another(size: int) -> Tensor:
    return table(size) * 2


def in_a_global(size: int) -> Tensor:
    if size not in TABLES:
        TABLES[size] = torch.arange(float(size))
    return TABLES[size]


def on_itself(size: int) -> Tensor:
    if not hasattr(on_itself, "kept"):
        on_itself.kept = torch.arange(float(size))  # type: ignore[attr-defined]
    kept: Tensor = on_itself.kept  # type: ignore[attr-defined]
    return kept


def in_a_default(size: int, kept: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return kept.setdefault(size, torch.arange(float(size)))


class Keeping:
    """A class that keeps what it makes, in three ways."""

    kept: ClassVar[dict[int, Tensor]] = {}

    @classmethod
    def on_the_class(cls, size: int) -> Tensor:
        if size not in cls.kept:
            cls.kept[size] = torch.arange(float(size))
        return cls.kept[size]

    @staticmethod
    @functools.lru_cache
    def behind_a_method(size: int) -> Tensor:
        return torch.arange(float(size))


CACHED: tuple[Any, ...] = (table, tables, through_another, Keeping.behind_a_method)
KEEPERS: dict[str, Callable[[int], Tensor]] = {
    "lru_cache": table,
    "several tensors": lambda size: sum(tables(size)["both"], torch.zeros(size)),
    "one cache in another": through_another,
    "static method": Keeping.behind_a_method,
    "global": in_a_global,
    "attribute of a function": on_itself,
    "default": in_a_default,
    "attribute of a class": Keeping.on_the_class,
}


class Model(nn.Module):
    """Uses a kept tensor, where asked for in training alone, so that a recorded run does not make it."""

    def __init__(self, keep: Callable[[int], Tensor], only_training: bool = False) -> None:
        super().__init__()
        self.linear, self.keep, self.only_training = nn.Linear(8, 8), keep, only_training

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.linear(x))
        return y * self.keep(8) if self.training or not self.only_training else y


@pytest.fixture(autouse=True)
def _emptied() -> Iterator[None]:
    yield
    _forget()


def _forget() -> None:
    for cached in CACHED:
        cached.cache_clear()
    for kept in (TABLES, Keeping.kept, *(in_a_default.__defaults__ or ())):
        kept.clear()
    vars(on_itself).clear()


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("only_training", [False, True])
@pytest.mark.parametrize("name", KEEPERS)
def test_what_a_function_keeps_has_data(name: str, only_training: bool) -> None:
    model, x = Model(KEEPERS[name], only_training), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    schedule.optimize(model, (x,), cost_guard=False)
    assert type(KEEPERS[name](8)) is Tensor
    for given in (x, torch.randn(2, 3, 8), torch.randn(2, 3, 4, 8)):
        _forget()  # what is kept now is made by a call, perhaps one that adapts
        expected = twin(given)
        _forget()
        torch.testing.assert_close(model(given), expected)
        assert type(KEEPERS[name](8)) is Tensor and not KEEPERS[name](8).requires_grad


def test_a_cache_that_scheduling_filled_is_empty_again_and_another_is_not() -> None:
    kept = table(5)
    schedule.optimize(Model(tables_of_eight), (torch.randn(4, 8),), cost_guard=False)
    assert tables.cache_info().currsize == 0 and table(5) is kept


def tables_of_eight(size: int) -> Tensor:
    return tables(size)["both"][0] + table(5)[0]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.T) / 2


def parametrized() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_training_goes_on_where_parametrizations_are_cached() -> None:
    model, x = parametrized(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    with parametrize.cached(), pytest.raises(ScheduleError, match="cached"):
        schedule.optimize(model, (x,), cost_guard=False)
    schedule.optimize(model, (x,), cost_guard=False)
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for given in (x, torch.ones(2, 3, 8), torch.ones(2, 3, 8)):
            optimizer.zero_grad()
            with parametrize.cached():
                (each(given) + each(given)).square().mean().backward()
                assert all(type(kept) is Tensor for kept in parametrize._cache.values())
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
