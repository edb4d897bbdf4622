"""Sequence parallelism: what is between the groups of a plan works on parts of the sequence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.api.simulate import planned, simulate
from schedule.util.errors import ShardError
from tests.distributed.constructs import ReadsWhole
from tests.zoo import batch, build


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_halves_of_the_collectives(name: str) -> None:
    """Two layers: four gathers and reduce-scatters each way, a gather at the end, and its scatter's gradient."""
    plan, seen = planned(build(name), batch(name, 2, 8), 2, vocabulary=False, sequence=True)
    assert seen.equal(1e-4), seen.where
    assert not any(key.startswith("sequence") for key in plan.whole)
    assert Counter(one.op for one in seen.forward) == {"all_gather": 5, "reduce_scatter": 4}
    large = [one.op for one in seen.backward if one.op != "all_reduce"]
    assert Counter(large) == {"all_gather": 5, "reduce_scatter": 4}
    norms = [one for one in seen.backward if one.op == "all_reduce"]
    assert all(one.nbytes == 128 for one in norms), "only gradients of norms' weights are summed"


def test_gradients_of_norms_are_partial_sums() -> None:
    plan, _ = planned(build("llama"), batch("llama", 2, 8), 2, vocabulary=False, sequence=True)
    plan.boundaries = [step for step in plan.boundaries if step.argument != "weight"]
    seen = simulate(build("llama"), batch("llama", 2, 8), lambda sch: sch.apply_plan(plan), 2)
    assert not seen.equal() and "layernorm" in seen.where


def test_where_it_cannot_be_says_why() -> None:
    plan = schedule.create_schedule(build("vit"), batch("vit")).shard_plan(2, sequence=True)
    assert any("17 cannot be shared evenly" in why for why in plan.whole.values())
    assert not plan.boundaries
    plan = schedule.create_schedule(build("albert"), batch("albert", 2, 8)).shard_plan(2, sequence=True)
    assert any("more than once" in why for why in plan.whole.values())


class Mixing(nn.Module):
    """An attention whose code reads a size off what is whole, so that it stays whole, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), ReadsWhole()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        result: Tensor = x + self.down(self.up(x).relu())
        return result


def test_an_attention_that_stays_whole_gets_the_whole_sequence() -> None:
    """And computes the same on every rank: what it gives is sharded again, and nothing is summed for it."""
    model, given = nn.Sequential(Mixing(), Mixing()), torch.randn(2, 6, 16)
    plan, seen = planned(model, given, 2, sequence=True)
    assert seen.equal(1e-4), seen.where
    around = [step for step in plan.boundaries if step.path == "0.attention"]
    assert [(step.mode, step.op) for step in around] == [("fwd_pre", "RSR->RRR"), ("fwd_post", "RRR->RSR")]
    assert not any("norm" in step.path and "->" in step.op for step in plan.boundaries)
    large = [one.op for one in seen.backward if one.op != "all_reduce"]
    assert Counter(large) == {"all_gather": 2 + 2, "reduce_scatter": 2}


def test_a_sequence_that_cannot_be_shared() -> None:
    plan = schedule.create_schedule(build("llama"), batch("llama", 2, 8)).shard_plan(2, sequence=True)

    def apply(sch: Any) -> None:
        sch.apply_plan(plan)

    with pytest.raises(ShardError, match="size 7 of axis 1 cannot be shared evenly by 2 ranks"):
        simulate(build("llama"), batch("llama", 2, 7), apply, 2)
