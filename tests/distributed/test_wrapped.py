"""Forwards of sharded modules that are not Linear, on simulated ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from schedule.api.simulate import simulate
from schedule.distributed.tensor_parallel.wrapped import on_first_tensor
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


class KindAndValue(NamedTuple):
    """What a module may return."""

    kind: str
    value: Tensor


class Outputs(list[Any]):
    """What a module may return."""


@pytest.mark.parametrize(
    "result",
    [
        (None, torch.ones(2)),
        [torch.ones(2)],
        Outputs([torch.ones(2)]),
        {"kind": "a", "value": torch.ones(2)},
        KindAndValue("a", torch.ones(2)),
        torch.return_types.max((torch.ones(2), torch.ones(2))),
        BaseModelOutput(last_hidden_state=torch.ones(2)),
    ],
    ids=lambda result: type(result).__name__,
)
def test_only_the_first_tensor_of_an_output_changes(result: Any) -> None:
    """And the object that the module returned, which it may keep, does not."""
    before = list(result.values() if isinstance(result, dict) else result)
    changed = on_first_tensor(result, lambda tensor: tensor + 1)
    assert type(changed) is type(result)
    assert all(a is b for a, b in zip(before, result.values() if isinstance(result, dict) else result, strict=True))
    other = list(changed.values() if isinstance(changed, dict) else changed)
    at = next(index for index, item in enumerate(before) if isinstance(item, Tensor))
    assert torch.equal(other[at], torch.full((2,), 2.0))
    assert all(a is b for index, (a, b) in enumerate(zip(before, other, strict=True)) if index != at)
    if isinstance(changed, BaseModelOutput):
        assert torch.equal(changed.last_hidden_state, other[at])


@pytest.mark.parametrize("result", [None, 1.0, ([torch.ones(2)],), {"kind": "a"}])
def test_an_output_without_a_tensor_to_synchronize(result: Any) -> None:
    with pytest.raises(ShardError, match="no tensor to synchronize"):
        on_first_tensor(result, lambda tensor: tensor)
