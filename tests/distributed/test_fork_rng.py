"""Random numbers of each rank's own, on two gloo processes; the CUDA generators by a stand-in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import schedule
from schedule.core.wrapping import wrappers_of
from schedule.distributed.communication import rng
from tests.distributed import launch
from tests.distributed.blocks import Gated, shard_gated


class Drops(nn.Module):
    """Dropout outside, inside, outside."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (
            nn.Dropout(0.5),
            nn.Sequential(nn.Dropout(0.5), nn.Tanh()),
            nn.Dropout(0.5),
        )
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        z = self.inside(torch.ones_like(y))
        self.seen = [(y != 0).float(), (z != 0).float(), (self.after(torch.ones_like(y)) != 0).float()]
        return (y + 1) * z


def alike(tensor: torch.Tensor) -> bool:
    """Whether both ranks hold the same."""
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.contiguous())
    return all(torch.equal(both[0], other) for other in both)


def made(mesh: Any) -> schedule.Schedule:
    torch.manual_seed(0)
    return schedule.create_schedule(Drops(), batch=torch.ones(4, 64), mesh=mesh)


def inside_only(mesh: Any) -> None:
    sch = made(mesh)
    state = torch.get_rng_state()
    sch["inside"].fork_rng()
    assert torch.equal(torch.get_rng_state(), state)
    masks = []
    for _ in range(2):
        sch.module(torch.ones(4, 64))
        masks.append([mask.clone() for mask in sch.module.seen])
        assert [alike(mask) for mask in masks[-1]] == [True, False, True]
    assert all(not torch.equal(a, b) for a, b in zip(*masks, strict=True))  # and they go on, not over again
    assert alike(torch.get_rng_state().float())
    sch.undo()
    sch.module(torch.ones(4, 64))
    assert [alike(mask) for mask in sch.module.seen] == [True, True, True]


def under_checkpointing(mesh: Any) -> None:
    for order in (("fork", "inside"), ("inside", "fork"), ("", "fork"), ("fork", "")):
        grads = []
        for recomputed in (False, True):
            sch = made(mesh)
            for step in order:
                if step == "fork":
                    sch["inside"].fork_rng()
                elif recomputed and step == "inside":
                    sch["inside"].checkpoint()
                elif recomputed:
                    sch.checkpoint()
            torch.manual_seed(5)
            x = torch.ones(4, 64, requires_grad=True)
            sch.module(x).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads), order
        assert not alike(grads[0])


def with_a_graph_of_its_own(mesh: Any) -> None:
    sch = made(mesh)
    sch["inside"].fork_rng()
    sch["inside"].fuse(sch["inside"].find(lambda x: torch.tanh(x), expect=1), compiler=None)
    sch.module(torch.ones(4, 64))
    assert [alike(mask) for mask in sch.module.seen] == [True, False, True]
    twin = copy.deepcopy(sch.module)
    torch.manual_seed(1)
    sch.module(torch.ones(4, 64))
    torch.manual_seed(1)
    twin(torch.ones(4, 64))
    assert torch.equal(twin.seen[1], sch.module.seen[1])


def compiled(mesh: Any) -> None:
    sch = made(mesh)
    sch["inside"].fork_rng()
    run = torch.compile(sch.module, backend="eager")
    run(torch.ones(4, 64))
    assert [alike(mask) for mask in sch.module.seen] == [True, False, True]


def twice_is_refused(mesh: Any) -> None:
    sch = made(mesh)
    sch["inside"].fork_rng()
    for path in ("inside", "inside.0"):
        with pytest.raises(schedule.ShardError, match="random numbers of its own"):
            sch[path].fork_rng()
    assert len(sch.history) == 1


def sharded_afterwards(mesh: Any) -> None:
    """A module that is synchronized as a whole keeps what is around it."""
    torch.manual_seed(0)
    block = Gated()
    sch = schedule.create_schedule(block, batch=torch.ones(2, 3, 16), mesh=mesh)
    sch.checkpoint()
    sch.fork_rng()
    shard_gated(sch)
    assert [type(around).__name__ for around in wrappers_of(block)] == ["Recomputed", "OwnRandomNumbers"]
    assert block(torch.ones(2, 3, 16)).shape == (2, 3, 16)
    while len(sch.history) > 2:
        sch.undo()
    assert len(wrappers_of(block)) == 2


CASES = (sharded_afterwards, inside_only, under_checkpointing, with_a_graph_of_its_own, compiled, twice_is_refused)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_processes(case: launch.Case) -> None:
    launch.passes(case)


def test_without_a_mesh() -> None:
    sch = schedule.create_schedule(Drops(), batch=torch.ones(4, 64))
    with pytest.raises(schedule.ShardError, match="no mesh"):
        sch["inside"].fork_rng()


class Philox:
    """A CUDA generator: a seed and an offset."""

    def __init__(self) -> None:
        self.seed, self.offset = 11, 40

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_a_cuda_generator_goes_on_alike_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = [], []
    for rank in (0, 1):
        generator = Philox()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
        for _ in range(2):
            restore = rng.fork(rank)
            inside.append((generator.seed, generator.offset))
            generator.offset += 12
            rng.join(restore)
        outside.append((generator.seed, generator.offset))
    assert outside == [(11, 48), (11, 48)]
    assert len(set(inside)) == 4 and all(0 <= seed < 2**63 and offset == 0 for seed, offset in inside)
