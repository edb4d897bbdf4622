"""Calls of submodules before a check inside a graph: what is kept of them until the check has passed."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.report.costs import peak_bytes

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
    report = schedule.optimize(schedule.create_schedule(module, (x,)).trace(flatten=True), cost_guard=False)
    assert report.applied
    one = x.numel() * x.element_size()
    assert peak(module, x) <= peak(twin, x) + one // 2 < LAYERS / 2 * one
    with torch.no_grad():
        for layer in (module.layers[-1], twin.layers[-1]):
            layer.bias.fill_(1e6)  # the other branch
        for given in (x, -x):
            torch.testing.assert_close(module(given), twin(given))
