"""Branches on what is computed from constants alone: no guard, and no obstacle after a change of state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import install, state_of


class Clamped(nn.Module):
    """Changes its weight, then asks something."""

    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.proj, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        self.proj.weight.data.clamp_(-0.1, 0.1)
        return self.ask(self.proj(x))


def of_a_distribution(x: Tensor) -> Tensor:
    return x * torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(0.7))


def of_a_constant(x: Tensor) -> Tensor:
    return x * 2 if (torch.tensor([1.0, 3.0]) + 1).max() > 3 else x


@pytest.mark.parametrize("ask", [of_a_distribution, of_a_constant])
def test_an_answer_that_is_always_the_same(ask: Callable[[Tensor], Tensor]) -> None:
    module, x = Clamped(ask), torch.randn(2, 4)
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, (x,))
    sch.trace()
    install(module, sch.specializations)
    torch.testing.assert_close(module(x), twin(x))
    assert state_of(module).fallbacks == 0  # type: ignore[union-attr]


def of_data(x: Tensor) -> Tensor:
    return x * 2 if x.max() > 3 else x


def of_a_draw(x: Tensor) -> Tensor:
    return x * 2 if torch.rand(()) + 1 > 1.5 else x


@pytest.mark.parametrize("ask", [of_data, of_a_draw])
def test_an_answer_that_may_differ(ask: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(schedule.TraceError):
        schedule.create_schedule(Clamped(ask), (torch.randn(2, 4),)).trace()
