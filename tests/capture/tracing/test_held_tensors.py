"""Tensors that a forward reads through plain objects and containers held by its module: read again at each call."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from schedule.runtime.scheduled import state_of
from schedule.util.errors import ScheduleError
from tests.capture.running import schedule_all


class Tables:
    """A helper that is no module, with tensors of its own."""

    def __init__(self) -> None:
        self.rows = [torch.randn(8, 4), torch.randn(8, 4)]
        self.by_name = {"scale": torch.randn(4), ("a", 1): torch.randn(4)}
        self.bias = torch.randn(4)
        self.weight = nn.Parameter(torch.randn(4))

    def look_up(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        return self.rows[0][:n] + self.rows[-1][:n] * self.by_name["scale"]


class Holding(nn.Module):
    """Reads tensors of a helper, of lists, dicts and tuples in it, and of a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.randn(4))
        self.tables = Tables()
        self.settings = SimpleNamespace(offsets=(torch.randn(4), [torch.randn(4)]))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + self.tables.look_up(x) * self.tables.bias
        y = y * self.tables.weight + self.tables.by_name["a", 1]
        return y - self.settings.offsets[1][0] + self.settings.offsets[0] * self.settings.offsets[0].shape[0]


@functools.cache
def _scheduled(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = make().eval()
    original = copy.deepcopy(module)
    schedule_all(module, torch.randn(2, 4))
    return module, original


def both(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """A scheduled module and an untouched copy."""
    module, original = _scheduled(make)
    return copy.deepcopy(module), copy.deepcopy(original)


def fallbacks(module: nn.Module) -> int:
    state = state_of(module)
    assert state is not None
    return int(state.fallbacks)


def assert_equal_steps(module: Any, original: Any, x: torch.Tensor) -> None:
    """Results and gradients of all parameters, those of the helper too, are those of the original."""
    found = []
    for each in (module, original):
        each.zero_grad()
        parameters = [*each.parameters(), each.tables.weight]
        y = each(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), parameters)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_tensors_of_helpers_are_part_of_the_graph() -> None:
    module, original = both(Holding)
    for training in (True, False):
        for each in (module, original):
            each.train(training)
        for n in (2, 5):
            assert_equal_steps(module, original, torch.randn(n, 4))
    assert fallbacks(module) == 0


def _new_object(module: Any) -> None:
    torch.manual_seed(7)
    module.tables = Tables()


def _new_entry(module: Any) -> None:
    torch.manual_seed(7)
    module.tables.rows[0] = torch.randn(9, 4)
    module.tables.by_name["scale"] = torch.randn(4)
    module.settings.offsets[1][0] = torch.randn(4)


def _in_place(module: Any) -> None:
    module.tables.rows[1].mul_(3.0)
    module.tables.by_name["scale"].add_(1.0)


def _resized(module: Any) -> None:
    torch.manual_seed(7)
    module.tables.rows = [torch.randn(30, 4), torch.randn(40, 4)]


def _other_gradients(module: Any) -> None:
    module.tables.weight = nn.Parameter(torch.ones(4))
    module.tables.bias.requires_grad_()


CHANGES = [_new_object, _new_entry, _in_place, _resized, _other_gradients]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_the_graph_reads(change: Callable[[Any], None]) -> None:
    module, original = both(Holding)
    for each in (module, original):
        change(each)
    assert_equal_steps(module, original, torch.randn(2, 4))
    assert fallbacks(module) == 0


def _longer(module: Any) -> None:
    module.tables.rows.append(torch.full((8, 4), 5.0))


def _other_kind(module: Any) -> None:
    module.tables.rows[0] = module.tables.rows[0].double()


def _no_tensor(module: Any) -> None:
    module.tables.by_name["scale"] = 2.0


def _tied(module: Any) -> None:
    module.tables.rows[1] = module.tables.rows[0]


def _other_class(module: Any) -> None:
    class Doubled(Tables):
        def look_up(self, x: torch.Tensor) -> torch.Tensor:
            return super().look_up(x) * 2

    module.tables.__class__ = Doubled


def _a_list_with_methods(module: Any) -> None:
    class Reversed(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(1 - index % 2)

    module.tables.rows = Reversed(module.tables.rows)


@pytest.mark.parametrize("change", [_longer, _other_kind, _no_tensor, _tied, _other_class, _a_list_with_methods])
def test_changes_that_guards_notice(change: Callable[[Any], None]) -> None:
    module, original = both(Holding)
    for each in (module, original):
        change(each)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(module(x), original(x))


def test_a_copy_and_a_pickle_read_their_own() -> None:
    module, _ = both(Holding)
    twin, x = copy.deepcopy(module), torch.randn(2, 4)
    loaded = pickle.loads(pickle.dumps(module))
    before = module(x)
    for each in (twin, loaded):
        _in_place(each)
        assert torch.equal(module(x), before) and not torch.equal(each(x), before)
    _in_place(module)
    assert torch.equal(twin(x), module(x)) and torch.equal(loaded(x), module(x))


class Sharing(Holding):
    """A buffer is a tensor of the helper too, and is read through the helper."""

    def __init__(self) -> None:
        super().__init__()
        self.tables.bias = self.buffer


def test_of_two_names_of_a_tensor_the_one_is_read_that_the_forward_reads() -> None:
    module, original = both(Sharing)
    for each in (module, original):
        each.tables.bias = torch.ones(4)
    assert_equal_steps(module, original, torch.randn(2, 4))
    for each in (module, original):
        each.buffer = torch.zeros(4)
    assert_equal_steps(module, original, torch.randn(2, 4))


class Changing(nn.Module):
    """A submodule changes what the forward reads before and after it."""

    def __init__(self, tables: Tables, change: Callable[[Tables], None] | None) -> None:
        super().__init__()
        self.tables, self.change, self.count = tables, change, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change is not None:
            self.change(self.tables)
        return x * 2


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()
        self.child = Changing(self.tables, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.tables.rows[0][: x.shape[0]]
        y = self.child(y)
        return y + self.tables.rows[0][: x.shape[0]] * self.tables.bias


def _during_in_place(tables: Tables) -> None:
    tables.rows[0].add_(1.0)
    tables.bias = tables.bias + 1


def _during_replaced(tables: Tables) -> None:
    tables.rows[0] = tables.rows[0] + 1


def _during_removed(tables: Tables) -> None:
    del tables.rows[:]


def test_changes_by_a_submodule_are_read_or_refused() -> None:
    x = torch.randn(2, 4)
    module, original = both(Around)
    with torch.no_grad():
        assert torch.equal(module(x), original(x))
        for each in (module, original):
            each.child.change = _during_in_place
        for _ in range(2):
            assert torch.equal(module(x), original(x))
    assert fallbacks(module) == 0
    for change in (_during_replaced, _during_removed):
        module, _ = both(Around)
        module.child.change = change
        with pytest.raises(ScheduleError, match=r"tables\.rows"):
            module(x)


class Filling(nn.Module):
    """Caches a tensor per device, in a dict, while it evaluates (as timm's LeViT does)."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.randn(3, 4))
        self.cache: dict[str, torch.Tensor] = {}

    def train(self, mode: bool = True) -> Filling:
        super().train(mode)
        if mode:
            self.cache = {}
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return x + self.biases[1]
        key = str(x.device)
        if key not in self.cache:
            self.cache[key] = self.biases[1]
        return x + self.cache[key]


def test_tensors_cached_by_the_first_evaluation() -> None:
    module, original = both(Filling)
    with torch.no_grad():
        for change in (False, True):
            for mode in (False, True, False):
                for each in (module, original):
                    each.train(mode)
                for n in (2, 3, 2):
                    x = torch.randn(n, 4)
                    assert torch.equal(module(x), original(x))
                if change:
                    for each in (module, original):
                        each.biases.add_(1.0)
            assert {*module.cache} == {*original.cache} == {"cpu"}
            for each in (module, original):
                each.cache["cpu"] = torch.ones(4)
            assert torch.equal(module(x), original(x))
    assert fallbacks(module) <= 2
