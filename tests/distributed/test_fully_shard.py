"""Schedules before and after FSDP2 wraps the model, compiled or not, and undone under both."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import schedule
from schedule.distributed import full_tensor
from tests.distributed import launch
from tests.zoo import batch, build


def llama() -> tuple[Any, dict[str, torch.Tensor]]:
    model, given = build("llama", "sdpa"), batch("llama", 4, 6)
    model.config.use_cache = False  # type: ignore[union-attr]
    given["attention_mask"][:] = 1
    return model, given


def wrapped(model: Any, mesh: Any) -> None:
    """As accelerate's plugin does: the embedding and the last two layers are units of their own."""
    for unit in (model.model.embed_tokens, *model.model.layers, [model.model.norm, model.lm_head], model):
        fully_shard(unit, mesh=mesh)


def rewritten(sch: schedule.Schedule) -> None:
    """The layers only: a graph around them would hold units that are wrapped later."""
    for layer in sch["model.layers.*"]:
        assert layer.optimize(cost_guard=False).applied["gated_silu"] == 1
    sch["model.layers.0"].checkpoint()


def compiled(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def alike(model: nn.Module, twin: nn.Module, mesh: Any, given: dict[str, torch.Tensor]) -> None:
    """Gradients of each rank's rows, averaged, are those of the batch; no call falls back."""
    own = {name: value.chunk(mesh.size())[mesh.get_local_rank()] for name, value in given.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", schedule.FallbackWarning)
        model(**own).loss.backward()
    twin(**given).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        got = full_tensor(ours.grad)  # type: ignore[arg-type]
        torch.testing.assert_close(got, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, at=name: at + text)
    model.zero_grad()
    twin.zero_grad()


def trained_alike(mesh: Any, order: str) -> None:
    """Each letter is a step: (s)chedule, (f)ully_shard, (c)ompile, (u)ndo the schedule; then the model trains."""
    model, given = llama()
    twin, sch = copy.deepcopy(model), schedule.create_schedule(model, given)
    for step in order:
        if step == "s":
            rewritten(sch)
        elif step == "f":
            wrapped(model, mesh)
        elif step == "c":
            compiled(model)
        while step == "u" and sch.history:
            sch.undo()
        if "f" in order[: order.index(step) + 1]:
            alike(model, twin, mesh, given)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sfu", "fsu", "scfu", "fscu"])
def test_orders(order: str) -> None:
    launch.passes(partial(trained_alike, order=order), limit=300)
