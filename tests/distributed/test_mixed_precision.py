"""FSDP2 with a mixed-precision policy, as people train: in both orders all rewrites stay."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import schedule
from schedule.distributed import full_tensor
from tests.distributed import launch
from tests.distributed.test_fully_shard import llama


def wrapped(model: Any, mesh: Any, offload: bool, reshard: bool) -> None:
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
        "reshard_after_forward": reshard,
    }
    for unit in (*model.model.layers, model):
        fully_shard(unit, **options)


def trained_alike(mesh: Any, first: str, offload: bool, reshard: bool) -> None:
    """Twenty steps of AdamW, beside a twin that is wrapped in the same way."""
    model, given = llama()
    twin, start = copy.deepcopy(model), [parameter.detach().clone() for parameter in model.parameters()]
    own = {name: value.chunk(mesh.size())[mesh.get_local_rank()] for name, value in given.items()}
    wrapped(twin, mesh, offload, reshard)
    if first == "wrapped":
        wrapped(model, mesh, offload, reshard)
    report = schedule.optimize(model, own, cost_guard=False)
    if first == "scheduled":
        wrapped(model, mesh, offload, reshard)
    both: tuple[nn.Module, ...] = (model, twin)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in both]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", schedule.FallbackWarning)
        for _ in range(20):
            losses = [each(**own).loss for each in both]
            torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    for before, *after in zip(start, model.parameters(), twin.parameters(), strict=True):
        ours, theirs = (full_tensor(each) - before for each in after)  # type: ignore[arg-type]
        assert (ours - theirs).norm() < 0.1 * theirs.norm()
    assert report.active == report.count() == 10 and not report.falling_back, (
        report.applied,
        report.active,
        report.falling_back,
        report.declined,
    )
    assert not report.fallbacks or first == "scheduled", "each kind of call runs the original forward once at most"


@pytest.mark.parametrize("first", ["scheduled", "wrapped"])
def test_all_rewrites_stay(first: str) -> None:
    launch.passes(partial(trained_alike, first=first, offload=False, reshard=True), limit=300)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["scheduled", "wrapped"])
@pytest.mark.parametrize(("offload", "reshard"), [(False, False), (True, True), (True, False)])
def test_with_offloading_and_without_resharding(first: str, offload: bool, reshard: bool) -> None:
    launch.passes(partial(trained_alike, first=first, offload=offload, reshard=reshard), limit=300)
