"""Lists that a forward assigns to attributes and changes in place, while submodules run that may read them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule.runtime.scheduled import install, state_of
from schedule.util.errors import ScheduleError, TraceError


class Seeing(nn.Module):
    """Notes what it finds in the lists of its owner when it runs, and may change them."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: list[Any] = []
        self.seen: list[Any] = []
        self.change: Callable[[Any], None] = lambda owner: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for owner in self.owner:
            self.seen.append(([*owner.cache], [*owner.index]))
            self.change(owner)
        return x * 2


class Step(nn.Module):
    """Reads and changes the lists that it is given (as the convolutions of diffusers' video autoencoders do)."""

    def __init__(self) -> None:
        super().__init__()
        self.see = Seeing()

    def forward(self, x: torch.Tensor, cache: list[Any], index: list[int]) -> torch.Tensor:
        at = index[0]
        last = x.clone()
        if cache[at] is None:
            x = self.see(x)
        elif cache[at] == "first":
            x = self.see(x + 1)
        else:
            x = self.see(x + cache[at])
        cache[at] = "first" if cache[at] is None and at else last
        index[0] += 1
        return x


class Chunked(nn.Module):
    """Goes through chunks with a list of caches, which is assigned anew before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([Step(), Step()])
        self.clear()

    def clear(self) -> None:
        self.index, self.cache = [0], [None] * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clear()
        found = []
        for chunk in x.split(2, dim=1):
            self.index = [0]
            for step in self.steps:
                chunk = step(chunk, self.cache, self.index)
            found.append(chunk)
        self.clear()
        return torch.cat(found, dim=1)


class Returning(Chunked):
    """Returns a list that a submodule may have kept."""

    def forward(self, x: torch.Tensor) -> Any:
        self.cache = [x, "other"]
        return self.steps[0].see(x), self.cache


class Leaving(Chunked):
    """Leaves its lists as they are at the end, and returns one of them."""

    def forward(self, x: torch.Tensor) -> Any:
        self.clear()
        for chunk in x.split(2, dim=1):
            self.index = [0]
            for step in self.steps:
                chunk = step(chunk, self.cache, self.index)
        self.cache.append(chunk)
        return self.steps[0].see(chunk), self.cache


def scheduled(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """A module run by its flattened graph, and a copy of it that is not."""
    module = make().eval()
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, torch.randn(2, 6)).trace(flatten=True, leaves=(Seeing,))
    install(module, sch.specializations)
    return module, twin


def watch(module: Any, change: Callable[[Any], None]) -> list[Any]:
    """Let the submodules find their owner; return what they will have seen."""
    for step in module.steps:
        step.see.owner, step.see.change = [module], change
        step.see.seen = module.steps[0].see.seen
    return module.steps[0].see.seen


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


def nothing(owner: Any) -> None:
    """Leave the lists as they are."""


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@pytest.mark.parametrize("make", [Chunked, Leaving, Returning])
def test_lists_change_where_the_forward_changes_them(make: Callable[[], nn.Module]) -> None:
    module, twin = scheduled(make)
    assert alike(module(torch.ones(2, 6)), twin(torch.ones(2, 6)))
    seen, expected = watch(module, nothing), watch(twin, nothing)
    for n in (2, 3):
        x = torch.randn(n, 6)
        found = module(x)
        assert alike(found, twin(x))
        assert alike([module.cache, module.index], [twin.cache, twin.index])
        assert len(seen) > 0 and alike(seen, expected)
        assert make is Chunked or found[1] is module.cache
    loaded = pickle.loads(pickle.dumps(module))
    assert alike(loaded(x), twin(x)) and alike(loaded.cache, twin.cache)
    for each in (module, loaded):
        state = state_of(each)
        assert state is not None and state.fallbacks == 0


def _item(owner: Any) -> None:
    owner.cache[1] = "other"


def _number(owner: Any) -> None:
    owner.index[0] = float(owner.index[0])


def _longer(owner: Any) -> None:
    owner.cache.append(None)


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
@pytest.mark.parametrize("change", [_item, _number, _longer])
def test_a_list_changed_by_other_code_is_an_error(change: Callable[[Any], None]) -> None:
    module, _ = scheduled(Chunked)
    module(torch.ones(2, 6))
    watch(module, change)
    with pytest.raises(ScheduleError, match="was changed by code that the forward calls"):
        module(torch.ones(2, 6))


class Replacing(Chunked):
    """Reads the attribute itself after the submodule has run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = [x]
        y = self.steps[0].see(x)
        self.cache[0] = y
        return self.steps[1].see(y) + self.cache[0]


@pytest.mark.unreplayable("the test installs graphs beside the schedule")
def test_a_list_replaced_by_other_code_is_an_error() -> None:
    module, twin = scheduled(Replacing)
    x = torch.ones(2, 6)
    for _ in range(2):
        assert alike(module(x), twin(x)) and alike(module.cache, twin.cache)

    def replace(owner: Any) -> None:
        owner.cache = [*owner.cache]

    watch(module, replace)
    with pytest.raises(ScheduleError, match=r"self\.cache"):
        module(x)


class Nested(Chunked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = [x]
        y = self.steps[0].see(x)
        self.cache.append([y])
        return self.steps[1].see(y)


def test_a_list_in_a_list_is_refused() -> None:
    with pytest.raises(TraceError, match=r"puts an object into self\.cache"):
        scheduled(Nested)
