"""Trainer and accelerate train planned and scheduled models on several processes as on one device."""

from __future__ import annotations

import math
import os
import warnings
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
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

import schedule
from schedule.huggingface import ShardedTrainer
from tests.distributed import launch
from tests.needs import IS_OLD
from tests.zoo import batch, build

STEPS = 20
ROWS = 4
TRAINING = {"max_steps": STEPS, "learning_rate": 1e-2, "use_cpu": True, "seed": 3, "logging_steps": 1}
TRAINING |= {"save_steps": STEPS // 2, "disable_tqdm": True, "report_to": [], "adam_epsilon": 1e-3}
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


def planned(model: nn.Module, mesh: Any, context: bool = False) -> schedule.Schedule:
    """Sharded by its plan."""
    sch = schedule.create_schedule(model, batch=whole_rows(ROWS), mesh=mesh)
    sch.apply_plan(sch.shard_plan(vocabulary=False, context=context))
    return sch


def whole_rows(number: int) -> dict[str, torch.Tensor]:
    """Rows without padding."""
    together = batch("llama", number, 6)
    together["attention_mask"][:] = 1
    return together


def rows(number: int) -> list[dict[str, torch.Tensor]]:
    return [{name: value[i] for name, value in whole_rows(number).items()} for i in range(number)]


def trained(model: nn.Module, folder: Path, resume: Path | None = None, **given: Any) -> ShardedTrainer:
    """A Trainer that made or finished 20 steps, and saved after 10 and 20."""
    arguments = hf.TrainingArguments(str(folder), **TRAINING | given)
    trainer = ShardedTrainer(model, arguments, train_dataset=rows(4 * ROWS))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def losses_of(trainer: hf.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trainer_with_a_plan(mesh: Any, fsdp: int, folder: Path, resume: Path | None, expected: list[float]) -> None:
    """``fsdp`` × 2 processes: FSDP2 and a plan."""
    with launched(2 * fsdp):
        sizes = accelerate.ParallelismConfig(dp_shard_size=fsdp, tp_size=2)
        model: Any = build("llama", seed=0 if resume is None else 1)
        shard(sizes.get_device_mesh("cpu"), model)
        given = {"per_device_train_batch_size": ROWS // fsdp, "parallelism_config": sizes}
        trainer = trained(model, folder, resume, **given)
        trainer.save_model(str(folder / "whole"))
    assert losses_of(trainer) == pytest.approx(expected, rel=TOLERANCE)


def test_trainer_resumes(tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": ROWS, "max_steps": 4, "save_steps": 2}
    first = trained(build("llama"), tmp_path, **given)
    resumed = trained(build("llama", seed=1), tmp_path, tmp_path / "checkpoint-2", **given)
    assert losses_of(resumed) == losses_of(first)
    first.save_model()
    whole = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(map(torch.equal, whole.parameters(), first.model.parameters()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainer_with_a_plan(tmp_path: Path) -> None:
    """20 steps on four processes are those on one; from the tenth on, two and one finish them alike."""
    alone = trained(build("llama"), tmp_path / "1", per_device_train_batch_size=ROWS)
    expected, saved = losses_of(alone), tmp_path / "4" / "checkpoint-10"
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.3
    case = partial(trainer_with_a_plan, folder=tmp_path / "4", expected=expected)
    launch.passes(partial(case, fsdp=2, resume=None), ranks=4, limit=400)
    launch.passes(partial(case, fsdp=1, resume=saved), limit=200)
    resumed = trained(build("llama", seed=1), tmp_path / "r", saved, per_device_train_batch_size=ROWS)
    assert losses_of(resumed) == pytest.approx(expected, rel=TOLERANCE)
    whole = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "4" / "whole")
    for (name, ours), theirs in zip(whole.named_parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, at=name: at + text)


def shard(mesh: Any, model: Any) -> None:
    """Plan over "tp", rewrite, and ``fully_shard`` over the other dimension."""
    assert schedule.optimize(planned(model, mesh), cost_guard=False).applied
    if IS_OLD:
        model._tp_size = mesh["tp"].size()
    else:
        model.config.distributed_config = DistributedConfig(tp_size=mesh["tp"].size())
    if "dp_shard" in mesh.mesh_dim_names:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh["dp_shard"])


# -- accelerate -----------------------------------------------------------------------------------------------

Prepare = Callable[[accelerate.Accelerator, nn.Module, Any], tuple[Any, Any, Any]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def alone(accelerator: accelerate.Accelerator, model: nn.Module, loader: Any) -> Any:
    return accelerator.prepare(model, adamw(model), loader)


def with_fully_shard(accelerator: accelerate.Accelerator, model: nn.Module, loader: Any) -> Any:
    shard(accelerator.torch_device_mesh, model)
    return alone(accelerator, model, loader)


def with_the_plugin(accelerator: accelerate.Accelerator, model: nn.Module, loader: Any) -> Any:
    """accelerate's FSDP plugin wraps the model, but its own tensor and context parallelism leave it alone."""
    sch = planned(model, accelerator.torch_device_mesh, context=accelerator.parallelism_config.cp_enabled)
    model = fsdp2_prepare_model(accelerator, model)
    assert schedule.optimize(sch, cost_guard=False).applied  # after: it wraps the embedding and the last norm too
    return model, accelerator.prepare_optimizer(adamw(model)), accelerator.prepare_data_loader(loader)


def accelerate_losses(accelerator: accelerate.Accelerator, prepare: Prepare, rows_of_rank: int) -> list[float]:
    """Train with ``Accelerator``; the losses are means over the ranks."""
    made = build("llama", "sdpa")
    made.config.use_cache = False
    loader: Any = torch.utils.data.DataLoader(rows(4 * ROWS), batch_size=rows_of_rank)  # type: ignore[arg-type]
    model, optimizer, loader = prepare(accelerator, made, loader)
    losses: list[float] = []
    while len(losses) < STEPS:
        for each in loader:
            loss = model(**each).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def accelerated(mesh: Any, sizes: dict[str, int], prepare: Prepare, expected: list[float]) -> None:
    with launched(math.prod(sizes.values())), warnings.catch_warnings():
        config = accelerate.ParallelismConfig(**sizes)
        given: dict[str, Any] = {"cpu": True, "parallelism_config": config}
        if prepare is with_the_plugin:
            warnings.simplefilter("error", schedule.FallbackWarning)
            given["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
            )
        losses = accelerate_losses(accelerate.Accelerator(**given), prepare, ROWS // config.dp_shard_size)
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "prepare"),
    [
        ({"tp_size": 2}, with_fully_shard),
        pytest.param({"dp_shard_size": 2, "tp_size": 2}, with_fully_shard, marks=pytest.mark.slow),
        pytest.param({"dp_shard_size": 2, "tp_size": 2}, with_the_plugin, marks=pytest.mark.slow),
        pytest.param({"cp_size": 2}, with_the_plugin, marks=pytest.mark.slow),
        pytest.param({"dp_shard_size": 2, "cp_size": 2}, with_the_plugin, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else "×".join(value),
)
def test_accelerate_with_a_plan(sizes: dict[str, int], prepare: Prepare) -> None:
    expected = accelerate_losses(accelerate.Accelerator(cpu=True), alone, ROWS)
    case = partial(accelerated, sizes=sizes, prepare=prepare, expected=expected)
    launch.passes(case, ranks=math.prod(sizes.values()), limit=300)
