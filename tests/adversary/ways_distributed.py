"""Tools that train a model on several processes, each as users call it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.adversary.curves import STEPS, Curve, Run, evaluated, fallbacks, optimizer_for, trained, values

_LAYERS = {
    "gpt2": ["transformer.h"],
    "llama": ["model.layers"],
    "bert": ["bert.encoder.layer"],
    "t5": ["encoder.block", "decoder.block"],
}


def fsdp2(run: Run, mesh: Any, schedule_first: bool) -> Curve:
    """``fully_shard`` on each layer and on the whole; clipping, evaluations, a state dict taken and loaded midway."""
    model = run.build()
    if schedule_first:
        run.schedule(model)
    for path in _LAYERS[run.name]:
        for layer in model.get_submodule(path):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not schedule_first:
        run.schedule(model)
    assert all(isinstance(layer, FSDPModule) for path in _LAYERS[run.name] for layer in model.get_submodule(path))
    others: list[float] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, number: int) -> None:
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        others.append(float(norm.full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
        if number % 5 == 4:
            others.append(evaluated(model, run))

    optimizer = optimizer_for(model.parameters())
    first = trained(model, run, step, optimizer, range(STEPS // 2))
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=whole)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, state, options=whole)
    second = trained(model, run, step, optimizer, range(STEPS // 2, STEPS))
    return Curve([*first.losses, *second.losses], first.start, second.end, others, second.fallbacks)


def ddp(run: Run, mesh: Any, schedule_first: bool) -> Curve:
    """``DistributedDataParallel``, with gradients summed over two steps before they are reduced."""
    model = run.build()
    if schedule_first:
        run.schedule(model)
    wrapped = DistributedDataParallel(model)
    if not schedule_first:
        run.schedule(wrapped)
    optimizer = optimizer_for(wrapped.parameters())
    curve = Curve(start=values(model))
    wrapped.train()
    for number in range(STEPS):
        torch.manual_seed(number)
        if number % 2:
            loss = wrapped(**run.batch(number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with wrapped.no_sync():
                loss = wrapped(**run.batch(number)).loss
                loss.backward()
        curve.losses.append(float(loss.detach()))
        if number % 5 == 4:
            curve.others.append(evaluated(wrapped, run))
    curve.end, curve.fallbacks = values(model), fallbacks(model)
    return curve


DISTRIBUTED_WAYS: dict[str, Callable[[Run, Any], Curve]] = {
    "schedule, then FSDP2": partial(fsdp2, schedule_first=True),
    "FSDP2, then schedule": partial(fsdp2, schedule_first=False),
    "schedule, then DDP": partial(ddp, schedule_first=True),
    "DDP, then schedule": partial(ddp, schedule_first=False),
}
