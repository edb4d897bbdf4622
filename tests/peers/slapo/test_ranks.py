"""Slapo's other tests on two ranks, on two gloo processes: recomputation, random numbers, checks, training.

(``test_checkpoint.py``, ``test_fork_rng.py``, ``test_random.py``, ``test_verify.py``, ``end2end.py``.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import schedule
from tests import zoo
from tests.distributed import launch
from tests.distributed.blocks import Mlp, observed, shard_mlp
from tests.peers.slapo.test_sharding import GRADIENTS, OUTPUT, X, alike, linears, scheduled

pytestmark = pytest.mark.slow

# -- recomputation and random numbers ----------------------------------------------------------------------------


def recomputed(what: str, mesh: Any) -> None:
    def shard(sch: Any) -> None:
        shard_mlp(sch)
        sch["fc1"].checkpoint()

    alike(linears, shard, what, mesh)


class Dropped(Mlp):
    """Dropout of the sharded features, and of the result."""

    def __init__(self) -> None:
        super().__init__(8, 12)
        self.act, self.last = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


def drawn_again(mesh: Any) -> None:
    """With numbers of the rank's own inside, and the same on all at the end."""
    seen = []
    for again in (False, True):
        torch.manual_seed(3)
        sch, _ = scheduled(Dropped(), mesh, shard_mlp, X)
        sch["act"].fork_rng()
        if again:
            sch.checkpoint()
        torch.manual_seed(5)
        seen.append(observed(sch.module, X))
    for name in seen[0]:
        assert torch.equal(seen[0][name], seen[1][name])


def masks(forked: bool, mesh: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Those of both ranks inside a module, and this rank's numbers afterwards."""
    sch = schedule.create_schedule(nn.Sequential(nn.Dropout(0.5)), torch.ones(4, 64), mesh=mesh)
    if forked:
        sch["0"].fork_rng()
    torch.manual_seed(7)
    own = sch.module(torch.ones(4, 64))
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    return both[0], both[1], torch.rand(3)


def same_mask(forked: bool, mesh: Any) -> None:
    first, second, _ = masks(forked, mesh)
    assert torch.equal(first, second) is not forked


def same_numbers_outside(mesh: Any) -> None:
    *_, after = masks(True, mesh)
    both = [torch.empty_like(after) for _ in range(2)]
    dist.all_gather(both, after)
    assert torch.equal(*both)


def own_numbers_of_the_seed(mesh: Any) -> None:
    assert torch.equal(masks(True, mesh)[0], masks(True, mesh)[0])


RANDOM = {
    "a layer is recomputed: output": partial(recomputed, OUTPUT),
    "a layer is recomputed: gradients": partial(recomputed, GRADIENTS),
    "dropout is drawn again": drawn_again,
    "masks are the same": partial(same_mask, False),
    "masks differ": partial(same_mask, True),
    "numbers outside are the same": same_numbers_outside,
    "numbers inside follow from the seed": own_numbers_of_the_seed,
}


@pytest.mark.parametrize("what", RANDOM)
def test_recomputation_and_random_numbers(what: str) -> None:
    launch.passes(RANDOM[what])


# -- checks, and training ----------------------------------------------------------------------------------------


def sharded_right(mesh: Any) -> None:
    sch = schedule.create_schedule(linears(), X, mesh=mesh)
    with schedule.verify(sch, X, steps=1):
        shard_mlp(sch)


def a_sync_is_missing(mesh: Any) -> None:
    sch = schedule.create_schedule(linears(), X, mesh=mesh)
    with pytest.raises(schedule.VerificationError):  # noqa: SIM117
        with schedule.verify(sch, X, steps=1):
            shard_mlp(sch)
            sch.undo()


def from_the_meta_device(mesh: Any) -> None:
    with torch.device("meta"):
        model = linears()
    sch = schedule.create_schedule(model, X, mesh=mesh)
    with schedule.verify(sch, X, steps=1):
        shard_mlp(sch)
        schedule.build(sch)


def shard_bert(sch: Any) -> None:
    for block in sch["bert.encoder.layer.*"]:
        for name in ("query", "key", "value"):
            block[f"attention.self.{name}"].shard("weight", axis=0)
            block[f"attention.self.{name}"].shard("bias", axis=0)
        block["attention.self"].sync("bwd_post", "all_reduce")
        block["attention.output.dense"].shard("weight", axis=1)
        block["attention.output.dense"].sync("fwd_post", "all_reduce")
        shard_mlp(block, "intermediate.dense", "output.dense")


def bert(mesh: Any) -> None:
    """Its heads are divided without a change of its views."""
    sch = schedule.create_schedule(zoo.build("bert"), zoo.batch("bert"), mesh=mesh)
    with schedule.verify(sch, zoo.batch("bert"), steps=1, training=False):
        shard_bert(sch)


def trains(name: str, mesh: Any) -> None:
    """By the plan found for it, ten steps."""
    torch.manual_seed(0)
    model, batch = zoo.build(name), zoo.batch(name)
    sch = schedule.create_schedule(model, batch, mesh=mesh)
    sch.apply_plan(sch.shard_plan(mesh))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(model(**batch).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


CHECKS = {
    "a right schedule passes": sharded_right,
    "a missing collective is noticed": a_sync_is_missing,
    "a model on the meta device is built and checked": from_the_meta_device,
    "BERT sharded by hand passes": bert,
    "BERT trains": partial(trains, "bert"),
    "GPT-Neo trains": partial(trains, "gpt_neo"),
}


@pytest.mark.parametrize("what", CHECKS)
def test_checks_and_training(what: str) -> None:
    launch.passes(CHECKS[what])
