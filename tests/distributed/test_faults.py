"""Ranks that differ, die, or are slow: every one ends in a clear error, none hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import schedule
from schedule.distributed.communication import agreement
from schedule.distributed.communication.verdicts import limited
from schedule.distributed.pipeline.pipeline import Pipeline
from schedule.util.errors import ShardError, VerificationError
from tests.distributed import launch
from tests.distributed.blocks import Mlp, scheduled, shard_mlp

X = torch.linspace(-1, 1, 192).view(2, 6, 16)


def scheduled_differently(mesh: Any) -> None:
    """Found before the first collective, which would add up what does not belong together."""

    def apply(sch: Any) -> None:
        shard_mlp(sch)
        if mesh.get_local_rank() == 1:
            sch.undo()
            sch["fc2"].sync("fwd_post", "reduce_scatter", axis=1)

    sch, _ = scheduled(Mlp(), mesh, apply, 16)
    with pytest.raises(ShardError, match="scheduled differently") as caught:
        sch.module(X)
    text = str(caught.value)
    assert "rank 0 did fc2.sync('fwd_post', all_reduce" in text and "rank 1 did fc2.sync('fwd_post', reduce_sc" in text
    while sch.history:
        sch.undo()


def never_comes(mesh: Any) -> None:
    """A rank that shards nothing never reaches a collective."""
    os.environ[agreement.LIMIT_VARIABLE] = "2"
    try:
        if mesh.get_local_rank() == 0:
            sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
            with pytest.raises(ShardError, match="rank 1 did not reach its first collective within 2 s"):
                sch.module(X)
    finally:
        del os.environ[agreement.LIMIT_VARIABLE]


def cut_differently(mesh: Any) -> None:
    """Stages of one rank would wait for tensors that the other does not send."""
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    sch = schedule.create_schedule(layers, batch=X, mesh=mesh)
    sch[str(mesh.get_local_rank())].cut_pipeline_stage()
    error = r"Step 1: rank \d did cut_pipeline_stage after \d, rank \d did cut_pipeline_stage after \d"
    with pytest.raises(ShardError, match=error):
        schedule.build(sch, pipeline=Pipeline(2))


def comes_too_late(mesh: Any) -> None:
    """The others gave up on it, and it says so at once instead of waiting for them in the collective."""
    os.environ[agreement.LIMIT_VARIABLE] = "1"
    try:
        sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
        late = mesh.get_local_rank() == 1
        dist.barrier()
        time.sleep(4 * late)
        start = time.monotonic()
        error = "rank 0 stopped before this collective: rank 1 did not reach" if late else "rank 1 did not reach"
        with pytest.raises(ShardError, match=error):
            sch.module(X)
        assert time.monotonic() - start < 10
        while sch.history:
            sch.undo()
    finally:
        del os.environ[agreement.LIMIT_VARIABLE]


def another_torch(mesh: Any) -> None:
    """Before the first collective, which may have another format there."""
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
    version = torch.__version__
    torch.__version__ = f"9.{mesh.get_local_rank()}"  # type: ignore[assignment]
    try:
        with pytest.raises(ShardError, match=r"different versions of torch: rank \d has 9\.\d, rank \d has 9\."):
            sch.module(X)
    finally:
        torch.__version__ = version


def another_dtype(mesh: Any) -> None:
    """Found before its first collective; the group is of use afterwards."""
    sch, twin = scheduled(Mlp(), mesh, shard_mlp, 16)
    torch.testing.assert_close(sch.module(X), twin(X), rtol=1e-4, atol=1e-5)
    dtype = torch.bfloat16 if mesh.get_local_rank() else torch.float64
    with pytest.raises(ShardError, match=r"rank \d calls all_reduce of torch.\w+, rank \d calls all_reduce of torch"):
        sch.module.to(dtype)(X.to(dtype))
    torch.testing.assert_close(sch.module.float()(X), twin(X), rtol=1e-1, atol=1e-1)


def one_rank_changes_its_dtype(mesh: Any) -> None:
    """It waits for the others, which call what they called before, each for its time limit."""
    os.environ[agreement.LIMIT_VARIABLE] = "2"
    try:
        sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
        sch.module(X)
        changes = mesh.get_local_rank() == 1
        dtype = torch.bfloat16 if changes else torch.float32
        error = "rank 0 did not reach its first collective" if changes else "failed on rank 0"
        with limited(mesh, 4), pytest.raises(ShardError, match=error):
            sch.module.to(dtype)(X.to(dtype))
    finally:
        del os.environ[agreement.LIMIT_VARIABLE]


def falls_behind(mesh: Any) -> None:
    """A rank that is slower than the time limit of the process group, after steps that went well."""
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
    sch.module(X)
    with limited(mesh, 2):
        dist.barrier()
        time.sleep(5 * mesh.get_local_rank())
        with pytest.raises(ShardError, match=r"all_reduce of 2 ranks failed on rank \d: (.|\n)*is too slow"):
            sch.module(X)


def slow(mesh: Any) -> None:
    """Slower than the others, and still in time."""
    sch, twin = scheduled(Mlp(), mesh, shard_mlp, 16)
    if mesh.get_local_rank() == 1:
        time.sleep(3)
    torch.testing.assert_close(sch.module(X), twin(X), rtol=1e-4, atol=1e-5)


def one_rank_computes_something_else(mesh: Any) -> None:
    """verify names it, on every rank."""
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)

    class Bent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(x) * 1.01

    before = sch["act"].module
    sch["act"].replace(Bent() if mesh.get_local_rank() == 1 else nn.GELU())
    assert before is not sch["act"].module
    with pytest.raises(VerificationError, match=r"rank [01]: ") as caught:
        schedule.verify(sch, X, steps=0, limit=20)
    assert "scheduled differently. Step 6: " in str(caught.value) and "replace(Bent) on act" in str(caught.value)


def a_step_is_wrong_everywhere(mesh: Any) -> None:
    """The step that is to blame is neither the first nor the last; both ranks name it, and stay as they were."""
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(2 * x)

    sch["act"].replace(Twice())
    sch["fc1"].annotate("bias", "decay", 0.0)
    done, local = [step.description for step in sch.history], sch.module.fc1.weight.to_local().clone()
    with pytest.raises(VerificationError, match=r"replace.* act, step 6 of 7, changed what") as caught:
        schedule.verify(sch, X, steps=0, limit=20)
    assert "rank 0: " in str(caught.value) and "rank 1: " in str(caught.value)
    assert [step.description for step in sch.history] == done
    assert torch.equal(sch.module.fc1.weight.to_local(), local)


def one_rank_raises(mesh: Any) -> None:
    """The other waits in a collective, for no longer than the limit."""
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("out of paper")

    sch["act"].replace(Raises() if mesh.get_local_rank() == 1 else nn.GELU())
    start = time.monotonic()
    with pytest.raises(VerificationError, match=r"rank 1: .*out of paper"):
        schedule.verify(sch, X, steps=0, limit=4)
    assert time.monotonic() - start < 60


CASES = [
    scheduled_differently,
    another_torch,
    another_dtype,
    cut_differently,
    comes_too_late,
    slow,
    one_rank_computes_something_else,
    a_step_is_wrong_everywhere,
]
LAST = [never_comes, one_rank_raises]
"""Afterwards the group is of no more use."""
LAST_SLOWLY = [one_rank_changes_its_dtype, falls_behind]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    launch.passes(case)


@pytest.mark.parametrize("case", LAST, ids=lambda case: case.__name__)
def test_and_the_group_is_lost(case: Any) -> None:
    try:
        launch.passes(case)
    finally:
        launch.stop()


def killed(mesh: Any) -> None:
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
    sch.module(X)
    if mesh.get_local_rank() == 1:
        os._exit(9)
    time.sleep(1)
    with pytest.raises(ShardError, match=r"all_reduce of 2 ranks failed on rank 0: (.|\n)*another rank died"):
        sch.module(X)
    dist.destroy_process_group()


def test_a_killed_rank() -> None:
    """The survivor gets an error at its next collective."""
    try:
        error = launch.run_one(killed, limit=100)
    finally:
        launch.stop()
    assert "rank 1:\nit died" in error and "rank 0" not in error


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [*CASES, *LAST, *LAST_SLOWLY, killed], ids=lambda case: case.__name__)
def test_twenty_times(case: Any) -> None:
    """Each ends on every rank within a minute."""
    for _ in range(20):
        if case not in CASES:
            launch.stop()
        launch.passes(nothing)  # the processes have started
        error = launch.run_one(case, limit=60)
        assert error == "" or (case is killed and "rank 1:\nit died" in error and "rank 0" not in error), error
    launch.stop()


def nothing(mesh: Any) -> None:
    """Return at once."""
