"""Trainer and accelerate train planned and scheduled models on several processes as on one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

import schedule
from schedule.distributed import clip_grad_norm_
from tests.distributed import launch
from tests.zoo import batch, build

STEPS = 20
ROWS = 4
TRAINING = {"max_steps": STEPS, "learning_rate": 1e-2, "use_cpu": True, "seed": 3, "logging_steps": 1}
TRAINING |= {"save_strategy": "no", "disable_tqdm": True, "report_to": [], "adam_epsilon": 1e-3}
TOLERANCE = 1e-4


@contextmanager
def launched(ranks: int) -> Iterator[None]:
    """Set what a launcher puts into the environment, and let accelerate take CPUs for devices.

    It refuses tensor parallelism and FSDP on CPUs; nothing that it does with them needs a device.
    """
    before = dict(os.environ)
    os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=str(ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialState, "_prepare_backend", lambda *_: ("gloo", accelerate.DistributedType.MULTI_GPU))
        patch.setattr(PartialState, "set_device", lambda state: setattr(state, "device", torch.device("cpu")))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


def planned(model: nn.Module, mesh: Any) -> schedule.Schedule:
    """Sharded by its plan, then rewritten."""
    sch = schedule.create_schedule(model, example_inputs=batch("llama", ROWS, 6), mesh=mesh)
    sch.apply_plan(sch.shard_plan(vocabulary=False))
    assert schedule.optimize(sch, cost_guard=False).applied
    return sch


def rows(number: int) -> list[dict[str, torch.Tensor]]:
    together = batch("llama", number, 6)
    together["attention_mask"][:] = 1
    return [{name: value[i] for name, value in together.items()} for i in range(number)]


def trainer_losses(model: nn.Module, folder: Path, **given: Any) -> list[float]:
    arguments = hf.TrainingArguments(str(folder), **TRAINING, **given)
    trainer = hf.Trainer(model, arguments, train_dataset=rows(4 * ROWS))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trainer_with_a_plan(mesh: Any, folder: Path, expected: list[float]) -> None:
    with launched(2):
        model: Any = build("llama")
        planned(model, mesh)
        model.config.distributed_config = DistributedConfig(tp_size=2)
        sizes = accelerate.ParallelismConfig(tp_size=2)
        losses = trainer_losses(model, folder, per_device_train_batch_size=ROWS, parallelism_config=sizes)
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
def test_trainer_with_a_plan(tmp_path: Path) -> None:
    expected = trainer_losses(build("llama"), tmp_path, per_device_train_batch_size=ROWS)
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.3
    launch.passes(partial(trainer_with_a_plan, folder=tmp_path, expected=expected))


def accelerate_losses(sizes: Any, prepare: Callable[[Any, nn.Module], Any], rows_of_rank: int) -> list[float]:
    """Train with ``Accelerator``; the losses are means over the ranks."""
    accelerator = accelerate.Accelerator(cpu=True, parallelism_config=sizes)
    model: Any = build("llama")
    prepare(accelerator, model)
    loader: Any = torch.utils.data.DataLoader(rows(4 * ROWS), batch_size=rows_of_rank)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    while len(losses) < STEPS:
        for each in loader:
            loss = model(**each).loss
            accelerator.backward(loss)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def shard(accelerator: Any, model: Any) -> None:
    """Plan over "tp" and ``fully_shard`` over the other dimension."""
    mesh = accelerator.torch_device_mesh
    planned(model, mesh)
    model.config.distributed_config = DistributedConfig(tp_size=mesh["tp"].size())
    if "dp_shard" in mesh.mesh_dim_names:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh["dp_shard"])


def accelerated(mesh: Any, fsdp: int, tp: int, expected: list[float]) -> None:
    with launched(fsdp * tp):
        sizes = accelerate.ParallelismConfig(dp_shard_size=fsdp, tp_size=tp)
        losses = accelerate_losses(sizes, shard, ROWS // fsdp)
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(("fsdp", "tp"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_accelerate_with_a_plan(fsdp: int, tp: int) -> None:
    expected = accelerate_losses(None, lambda accelerator, model: None, ROWS)
    launch.passes(partial(accelerated, fsdp=fsdp, tp=tp, expected=expected), ranks=fsdp * tp)
