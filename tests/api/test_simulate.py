"""Deviations of simulated ranks: what is not finite hides nothing."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.api.simulate import _apart, simulate

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "expected, got, deviation",
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([2.0, NAN], [1.0, NAN], 0.5),
        ([2.0, NAN], [2.0, 1.0], INF),
        ([2.0, INF], [1.0, INF], 0.5),
        ([2.0, INF], [2.0, -INF], INF),
        ([1.0, -3e38], [1.0, -2e38], 0.0),
    ],
)
def test_the_largest_relative_difference(expected: list[float], got: list[float], deviation: float) -> None:
    assert _apart(torch.tensor(expected), torch.tensor(got)) == deviation


class Noisy(nn.Module):
    """Draws noise, and the length of its result, behind collectives and before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + torch.randn_like(x))
        x = self.second(x * torch.rand_like(x))
        return torch.cat([x] * int(1 + torch.randint(5, ()) + random.randrange(5)), -1)


def test_every_rank_draws_the_numbers_of_the_whole_model() -> None:
    def shard(sch: schedule.Schedule) -> None:
        torch.rand(3)
        for name in ("first", "second"):
            sch[name].shard("weight", axis=1)
            sch[name].sync("fwd_pre", "scatter", axis=-1)
            sch[name].sync("fwd_post", "all_reduce")

    model, x = Noisy(), torch.randn(3, 4)
    before = torch.get_rng_state()
    seen = simulate(model, x, shard, 4)
    assert seen.equal(1e-5), seen.where
    assert seen.forward and torch.equal(before, torch.get_rng_state())
