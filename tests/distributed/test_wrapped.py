"""Forwards of sharded modules that are not Linear, on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schedule.api.simulate import simulate
from schedule.util.errors import ShardError


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 4, 1)
        self.third, self.fourth = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(F.relu(self.first(x))))
        y: Tensor = self.fourth(F.relu(self.third(x)))
        return y


@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_the_bias_of_a_convolution_after_a_reduce_scatter(axis: int) -> None:
    """Each rank adds it to a part of the sum, or a part of it to its channels: the gradient is summed."""

    def shard(sch: Any) -> None:
        for name in ("first", "third"):
            sch[name].shard("weight", axis=0)
            sch[name].shard("bias", axis=0)
        for name in ("second", "fourth"):
            sch[name].shard("weight", axis=1)
        sch["first"].sync("bwd_post", "all_reduce")
        sch["second"].sync("fwd_post", "reduce_scatter", axis=axis)
        sch["third"].sync("fwd_pre", "all_gather", axis=axis)
        sch["fourth"].sync("fwd_post", "all_reduce")

    seen = simulate(Convolutions(), (torch.randn(2, 4, 6),), shard, 2)
    assert seen.output < 1e-5 and seen.gradient < 1e-5, seen.where


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        words: Tensor = self.words(input=ids)
        return words


def test_an_embedding_called_by_keyword() -> None:
    def shard(sch: Any) -> None:
        sch["words"].shard("weight", axis=0)
        sch["words"].sync("fwd_post", "all_reduce")

    seen = simulate(Named(), (torch.tensor([[0, 5, 3]]),), shard, 2)
    assert seen.output < 1e-6 and seen.gradient < 1e-6, seen.where


class Counted(nn.Module):
    """Assigns a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x @ self.weight.t() * self.scale


class Rescaled(Counted):
    """Assigns a buffer that is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 2
        return x @ self.weight.t() * self.scale


def _sharded_outputs(sch: Any) -> None:
    sch["0"].shard("weight", axis=0)
    sch["0"].shard("scale", axis=0)
    sch["0"].sync("fwd_post", "all_gather", axis=1)
    sch["0"].sync("bwd_post", "all_reduce")


def test_a_buffer_that_the_forward_assigns() -> None:
    counts = []

    def shard(sch: Any) -> None:
        _sharded_outputs(sch)
        counts.append(sch["0"].module)

    seen = simulate(nn.Sequential(Counted()), (torch.randn(2, 4),), shard, 2)
    assert seen.output < 1e-5 and seen.gradient < 1e-5, seen.where
    assert [int(module.count) for module in counts] == [1, 1]


def test_a_sharded_buffer_that_the_forward_assigns() -> None:
    with pytest.raises(ShardError, match="assigns scale, which is sharded"):
        simulate(nn.Sequential(Rescaled()), (torch.randn(2, 4),), _sharded_outputs, 2)
