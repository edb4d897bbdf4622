"""Norms over features that the ranks share, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.api.simulate import simulate
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.planning.plan_steps import HEADS
from schedule.distributed.tensor_parallel.sharded_modules import MEANS
from schedule.util.errors import ShardError
from tests.distributed.constructs import Attention, Wrapper, X, planned, sharded


class Norm(nn.Module):
    """Divided by the root of the mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Centered(Norm):
    """Less the mean, as a layer norm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - torch.mean(x, dim=2, keepdim=True))


class OverTokens(Norm):
    """A mean over another dimension, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Normed(Attention):
    """Queries and keys of all heads in one norm each, as in OLMo 2."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.q, self.k = nn.Sequential(self.q, norm()), nn.Sequential(self.k, norm())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.o(self.mixed(x).flatten(2))
        return result


def test_norms_of_all_heads_together() -> None:
    plan, seen = planned(Wrapper(Normed(Centered)))
    assert sharded(plan).items() >= {"inner.q.0": 0, "inner.q.1": 0, "inner.k.1": 0, "inner.v": 0, "inner.o": 1}.items()
    assert HEADS in [group.kind for group in plan.groups]
    assert [one.op for one in seen.forward] == ["all_reduce"] * 6, "of o and down, and two means in both norms"
    assert [one.nbytes for one in seen.backward].count(2 * 5 * 4) == 4, "of a number for each of ten tokens"


def test_without_the_means_of_the_others() -> None:
    model = Wrapper(Normed(Norm))
    plan = schedule.create_schedule(model, X).shard_plan(2)
    groups = [replace(group, syncs=[one for one in group.syncs if one.mode != MEANS]) for group in plan.groups]
    broken = Plan(plan.ranks, groups, plan.whole)
    assert not simulate(model, X, lambda sch: sch.apply_plan(broken), 2).equal(1e-2)


def test_what_else_is_averaged() -> None:
    plan, _ = planned(Wrapper(Normed(OverTokens)))
    assert sharded(plan) == {"up": 0, "down": 1}
    assert "some of its means are over sharded features and others are not" in plan.whole["inner.q.0.weight"]


def test_not_where_the_sequence_is_shared() -> None:
    plan = schedule.create_schedule(Wrapper(Normed(Norm)), X).shard_plan(2, sequence=True)
    assert "mean works along it" in plan.whole["inner.q.0.weight"]


class Stream(nn.Module):
    """Layers whose insides nothing can be shared of, and norms before them."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.embedding, self.norm, self.last = nn.Embedding(9, 16), Norm(), last
        self.into, self.out = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        result: Tensor = self.last(x + self.out(self.into(self.norm(x)).cumsum(-1)))
        return result


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


def test_the_hidden_states_themselves() -> None:
    """They are shared where nothing else is; a mean outside of a norm keeps them whole."""
    ids = torch.randint(0, 9, (2, 5))
    plan, _ = planned(Stream(nn.Linear(16, 5)), ids)
    assert sharded(plan).items() >= {"embedding": 1, "norm": 0, "into": 1, "out": 0, "last": 1}.items()
    plan, _ = planned(Stream(Mean()), ids)
    assert not plan.groups and "over shared features" in plan.whole["into.weight"]


def test_means_that_cannot_be_synchronized() -> None:
    def refused(sch: Any) -> None:
        norm = sch["inner.q.1"]
        with pytest.raises(ShardError, match="shard its weight first"):
            norm.sync(MEANS, "all_reduce")
        norm.shard("weight", axis=0)
        for op, axis in (("all_gather", None), ("all_reduce", 1)):
            with pytest.raises(ShardError, match="means are averaged over the ranks"):
                norm.sync(MEANS, op, axis=axis)
        norm.sync(MEANS, "all_reduce")
        with pytest.raises(ShardError, match="already"):
            norm.sync(MEANS, "all_reduce")
        for _ in range(2):
            sch.undo()

    assert simulate(Wrapper(Normed(Norm)), X, refused, 2).equal(0.0)
