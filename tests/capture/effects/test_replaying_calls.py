"""Calls of submodules before a check inside a graph: what is kept of them until the check has passed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.core.adapting import adapter_for
from schedule.report.costs import peak_bytes
from schedule.runtime.scheduled import install, state_of
from schedule.util.errors import ScheduleError

LAYERS = 10


class Branching(nn.Module):
    """Plain layers, then something to rewrite and a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = F.silu(x) * self.layers[0](x)
        return x + 1 if x.sum() < 1e6 else x - 1


def peak(module: nn.Module, x: Tensor) -> int:
    """Return the most bytes that a forward pass without gradients has at once, after a first one."""
    with torch.no_grad():
        module(x)
        return peak_bytes(lambda: module(x), "cpu")


def test_results_of_plain_layers_are_freed_before_the_check() -> None:
    """A failed check computes them again, so nothing is kept for it."""
    torch.manual_seed(0)
    module, x = Branching().eval(), torch.randn(4096, 64)
    twin = copy.deepcopy(module)
    flat = schedule.create_schedule(module, (x,)).trace(flatten=True)
    report = schedule.optimize(flat, rules="gated_mlp", cost_guard=False)
    assert report.applied
    one = x.numel() * x.element_size()
    assert peak(module, x) <= peak(twin, x) + one // 2 < LAYERS / 2 * one
    with torch.no_grad():
        for layer in (module.layers[-1], twin.layers[-1]):
            layer.bias.fill_(1e6)  # the other branch
        for given in (x, -x):
            torch.testing.assert_close(module(given), twin(given))


class Activated(nn.Module):
    """An activation of the input, something to rewrite, and a branch on data."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.SiLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(x)
        y = F.silu(self.linear(y)) * self.linear(y)
        return y + 1 if y.sum() < 1e6 else y - 1


@pytest.mark.parametrize("hooked", [False, True])
def test_a_layer_set_to_work_in_place_is_not_called_again(hooked: bool) -> None:
    """Its input is changed by then, so the call cannot start again: that is an error, and never another result."""
    torch.manual_seed(0)
    module, x = Activated(), torch.randn(4, 8)
    twin = copy.deepcopy(module)
    flat = schedule.create_schedule(module, (x,)).trace(flatten=True)
    assert schedule.optimize(flat, rules="gated_mlp", cost_guard=False).applied
    for each in (module, twin):
        each.act.inplace = True
        if hooked:
            each.act.register_forward_hook(lambda *given: None)
        torch.testing.assert_close(each(x.clone()), twin(x.clone()))
        each.linear.bias.data.fill_(1e4)  # the other branch
    with pytest.raises(ScheduleError, match="changed in place"):
        module(x.clone())


def test_a_layer_traced_in_place_is_called_again_on_what_the_forward_makes_again() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(8, 8), Activated()), torch.randn(4, 8)
    module[1].act.inplace = True
    twin = copy.deepcopy(module)
    flat = schedule.create_schedule(module, (x,)).trace(flatten=True)
    assert schedule.optimize(flat, rules="gated_mlp", cost_guard=False).applied
    candidates = (twin, module, copy.deepcopy(module))
    for each in candidates:
        each[1].linear.bias.data.fill_(1e4)  # the other branch
    expected, *results = [each(x) for each in candidates]
    for result in results:
        torch.testing.assert_close(result, expected)


class Counting(nn.Module):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x) * torch.rand_like(x)


class Measured(nn.Module):
    """As many rows as the data say, found behind a call that counts; then another count, and another check."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(), Counting()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        rows = x[x[:, 0] > 0]
        parts = torch.split(rows, [1] * len(rows))
        y = self.second(y) + len(parts)
        return y + 1 if x.sum() > 0 else y - 1


def measured(positive: int, total: float) -> Tensor:
    x = -torch.rand(6, 4)
    x[:positive] *= -1
    return x + (total - x.sum()) / 18 * torch.tensor([0.0, 1.0, 1.0, 1.0])


def test_a_graph_made_after_a_failed_check_goes_on_with_the_calls_that_were_made() -> None:
    torch.manual_seed(0)
    module = Measured()
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, (measured(2, 5.0),))
    sch.trace(flatten=True, leaves=(Counting,))
    state = install(module, sch.specializations, adapter=adapter_for(sch, ())) or state_of(module)
    assert state is not None
    for positive, total in ((2, 5.0), (3, 5.0), (2, -5.0), (4, -5.0), (3, 5.0), (4, -5.0), (1, 2.0)):
        x, results = measured(positive, total), []
        for each in (module, twin):
            torch.manual_seed(positive)
            results += [each(x), torch.rand(2)]
        torch.testing.assert_close(results[0], results[2])
        torch.testing.assert_close(results[1], results[3], rtol=0, atol=0)
        assert [each.calls.item() for each in (module.first, module.second)] == [twin.first.calls, twin.second.calls]
    assert state.fallbacks == 0
    assert len(state.adaptations) >= 4
