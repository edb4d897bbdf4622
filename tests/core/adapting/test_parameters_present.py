"""Biases that are set or removed after a graph with the inside of their layer was made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from tests.small import bias_gelu

X = torch.linspace(-1, 1, 32).view(4, 8)


class Gated(nn.Module):
    """Linears with a bias and without, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8, bias=False)
        self.plain, self.biased = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + 1)
        return F.gelu(self.biased(x), approximate="tanh") + F.silu(self.plain(x)) * x


def optimized(sch: schedule.Schedule) -> None:
    """By rules, one of which takes the layer without a bias."""
    assert sch.optimize(rules=["default", "linear"], cost_guard=False).applied["linear"]


def computed_again(sch: schedule.Schedule) -> None:
    """By rules for memory, one of which takes that layer."""
    assert sch.optimize(rules="all", cost_guard=False).applied["recomputed_linear"]


def fused_by_hand(sch: schedule.Schedule) -> None:
    """What does not adapt."""
    sch.fuse(sch.find(bias_gelu, expect=1))


def decomposed(sch: schedule.Schedule) -> None:
    """A layer that is opened and not rewritten."""
    sch["biased"].decompose()


def set_bias(model: Gated) -> None:
    model.plain.bias = nn.Parameter(torch.linspace(0, 1, 8))


def remove_bias(model: Gated) -> None:
    model.biased.bias = None


def set_bias_of_norm(model: Gated) -> None:
    model.norm.bias = nn.Parameter(torch.linspace(0, 1, 8))


def set_and_remove(model: Gated) -> None:
    set_bias(model)
    remove_bias(model)


@pytest.mark.parametrize("change", [set_bias, remove_bias, set_bias_of_norm, set_and_remove])
@pytest.mark.parametrize("how", [optimized, computed_again, fused_by_hand, decomposed])
@pytest.mark.filterwarnings("ignore")
def test_a_bias_that_comes_or_goes_counts(
    how: Callable[[schedule.Schedule], None], change: Callable[[Gated], None]
) -> None:
    model, twin = Gated(), Gated()
    sch = schedule.create_schedule(model, X)
    how(sch)
    before = model(X)
    torch.testing.assert_close(before, twin(X))
    for each in (model, twin):
        change(each)
    torch.testing.assert_close(model(X), twin(X))
    assert not torch.allclose(model(X), before)
    model(X).sum().backward()
    twin(X).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    sch.undo()
    torch.testing.assert_close(model(X), twin(X))
