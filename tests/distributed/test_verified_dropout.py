"""verify of sharded models with dropout, with and without random numbers of each rank, on two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from tests.distributed import launch
from tests.distributed.blocks import shard_mlp

COMBINATIONS = ((0.3, True, None), (0.3, True, "drop"), (0.0, True, ""))
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))


class Dropped(nn.Module):
    """An MLP with dropout inside and after, and a batch norm that counts as training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(16, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, 16)
        self.norm, self.out = nn.BatchNorm1d(6), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 6, 16] → the same."""
        return x + self.out(self.norm(self.fc2(self.drop(self.act(self.fc1(x))))))


def scheduled(mesh: Any, p: float, shard: bool = True, fork: str | None = None) -> schedule.Schedule:
    torch.manual_seed(0)
    sch = schedule.create_schedule(Dropped(p), batch=X, mesh=mesh)
    if shard:
        shard_mlp(sch)
    if fork is not None:
        (sch[fork] if fork else sch).fork_rng()
    return sch


def verified(mesh: Any) -> None:
    """What is right passes; the report says where dropout was off."""
    for p, shard, fork in COMBINATIONS:
        sch = scheduled(mesh, p, shard, fork)
        state = torch.get_rng_state()
        found = schedule.verify(sch, X, steps=1, limit=20)
        off = [line for line in found.report.skipped if "compared without dropout" in line]
        assert found and bool(off) == (p > 0), (p, shard, fork, found.report.skipped)
        assert all(line.startswith("train mode") for line in off)
        assert {case.mode for case in found.report.cases} == {"train", "eval"}
        assert torch.equal(torch.get_rng_state(), state)


def outside(mesh: Any) -> None:
    """Masks of what is whole are the same on all ranks, and dropout stays on."""
    sch = scheduled(mesh, 0.3)
    sch.module.drop.p = 0.0
    assert not [line for line in schedule.verify(sch, X, steps=1, limit=20).report.skipped if "without" in line]


def wrong(mesh: Any) -> None:
    """What is wrong fails with dropout, too, and is named."""
    sch = scheduled(mesh, 0.3, fork="drop")
    sch["act"].replace(nn.GELU("tanh"))
    with pytest.raises(schedule.VerificationError, match=r"replace\(GELU\) on act, step 7 of 7, changed .*output.* in"):
        schedule.verify(sch, X, steps=0, limit=20)


def right_and_wrong(mesh: Any) -> None:
    verified(mesh)
    wrong(mesh)


@pytest.mark.parametrize(
    "case", [right_and_wrong, pytest.param(outside, marks=pytest.mark.slow)], ids=lambda case: case.__name__
)
def test_on_two_processes(case: launch.Case) -> None:
    launch.passes(case)
