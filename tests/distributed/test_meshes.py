"""Two dimensions of parallelism and more on four gloo processes, and checkpoints that go from mesh to mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel, LlamaForCausalLM

import schedule
from schedule.distributed import clip_grad_norm_, full_tensor
from schedule.distributed.checkpoint.checkpointing import load_sharded, save_sharded
from schedule.distributed.pipeline.pipeline import Pipeline
from tests.distributed import launch
from tests.distributed.models import (
    all_tensors,
    digest,
    initialized,
    llama,
    llama_on_meta,
    needs_meta,
    on_meta,
    schedule_of,
    shard_gpt2,
    shard_llama,
)
from tests.distributed.test_build import shared_folder

CONFIG = llama(2, 32, 64, 96, heads=4, kv_heads=4)
IDS = torch.arange(24).view(4, 6) % 60
BATCH = {"input_ids": IDS, "attention_mask": torch.zeros(4, 1, 6, 6), "labels": IDS}


def data_and_tensor_parallel(mesh: Any) -> None:
    """FSDP2 on one dimension, shards of a schedule on the other: losses, gradients and weights after three steps."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sch = schedule_of(llama_on_meta(CONFIG), both)
    shard_llama(sch)
    for layer in sch["model.layers.*"]:
        fully_shard(layer.module, mesh=both["dp"])
    fully_shard(sch.module, mesh=both["dp"])
    torch.manual_seed(2)
    model = schedule.build(sch).train()
    twin = initialized(llama_on_meta(CONFIG), seed=2).train()
    assert digest(dict(model.named_parameters())) == digest(dict(twin.named_parameters()))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False) for m in (model, twin))
    mine = both.get_local_rank("dp")
    for _ in range(3):
        share = {name: value.chunk(2)[mine] for name, value in BATCH.items()}
        model(**share).loss.backward()
        twin(**BATCH).loss.backward()
        norms = [clip(m.parameters(), 0.5) for clip, m in ((clip_grad_norm_, model), (nn.utils.clip_grad_norm_, twin))]
        torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
        assert float(norms[0]) > 0.5
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(
                full_tensor(p.grad), q.grad, rtol=1e-3, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}"
            )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (lambda: llama_on_meta(CONFIG), shard_llama, LlamaForCausalLM),
    "gpt2": (lambda: on_meta("gpt2"), shard_gpt2, GPT2LMHeadModel),
}


def saved_at_two_by_two(mesh: Any, folder: Path) -> None:
    """At TP 2 × DP 2, Llama on FSDP2 besides."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, (make, shard, _) in MODELS.items():
        sch = schedule_of(make(), both)
        shard(sch)
        if name == "llama":
            fully_shard(sch.module, mesh=both["dp"])
        torch.manual_seed(8)
        model = schedule.build(sch)
        wanted = digest(dict(model.named_parameters()))
        if dist.get_rank() == 0:
            (folder / f"{name}.digest").write_text(wanted)
        save_sharded(model, folder / name)
        other = schedule_of(make(), both)
        shard(other)
        torch.manual_seed(9)
        again = schedule.build(other)
        assert digest(dict(again.named_parameters())) != wanted
        load_sharded(again, folder / name)
        assert digest(dict(again.named_parameters())) == wanted


def loaded(mesh: Any, folder: Path) -> None:
    """At TP of all ranks that there are."""
    for name, (make, shard, _) in MODELS.items():
        sch = schedule_of(make(), mesh)
        shard(sch)
        model = schedule.build(sch, init_weights=folder / name)
        assert digest(dict(model.named_parameters())) == (folder / f"{name}.digest").read_text()


def tensor_and_pipeline_parallel(mesh: Any) -> None:
    """Two stages of two ranks each; and the same with a third dimension for data, and back into one model."""
    for dims, names in (((2, 2), ("pp", "tp")), ((2, 1, 2), ("pp", "dp", "tp"))):
        every = init_device_mesh("cpu", dims, mesh_dim_names=names)
        inputs = {name: torch.zeros_like(value[:2], device="meta") for name, value in BATCH.items()}
        sch = schedule.create_schedule(llama_on_meta(CONFIG), batch=inputs, mesh=every)
        shard_llama(sch)
        sch["model.layers.0"].cut_pipeline_stage()
        torch.manual_seed(4)
        model = schedule.build(sch, pipeline=Pipeline(2)).train()
        if "dp" in names:
            for stage in model.stages:
                fully_shard(stage, mesh=every["dp"])
        twin = initialized(llama_on_meta(CONFIG), seed=4).train()
        expected = twin(**BATCH).loss
        expected.backward()
        output = model.step(**BATCH)
        if output.loss is not None:
            torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-5, atol=1e-6)
        whole = dict(twin.named_parameters())
        for stage in model.stages:
            for name, p in stage.named_parameters():
                torch.testing.assert_close(
                    full_tensor(p.grad),
                    whole[name].grad,
                    rtol=1e-3,
                    atol=1e-5,
                    msg=lambda text, at=name: f"{at}: {text}",
                )
        if "dp" not in names:
            folder = shared_folder()
            save_sharded(model, folder)
            built = schedule.build(schedule.create_schedule(llama_on_meta(CONFIG)), init_weights=folder)
            assert digest(all_tensors(built)) == digest(all_tensors(twin))


CASES = (data_and_tensor_parallel, tensor_and_pipeline_parallel)


@needs_meta
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_four_processes(case: launch.Case) -> None:
    launch.passes(case, ranks=4)


@needs_meta
def test_checkpoints_go_from_mesh_to_mesh(tmp_path: Path) -> None:
    """Saved by four processes; loaded by four, by two, by this one, and by ``from_pretrained``."""
    launch.passes(partial(saved_at_two_by_two, folder=tmp_path), ranks=4)
    for ranks in (4, 2):
        launch.passes(partial(loaded, folder=tmp_path), ranks)
    for name, (make, _, kind) in MODELS.items():
        wanted = (tmp_path / f"{name}.digest").read_text()
        whole = schedule.build(schedule.create_schedule(make()), init_weights=tmp_path / name)
        assert digest(dict(whole.named_parameters())) == wanted
        whole.save_pretrained(tmp_path / f"hf {name}")
        assert digest(dict(kind.from_pretrained(tmp_path / f"hf {name}").named_parameters())) == wanted


def test_on_one_process(tmp_path: Path) -> None:
    model = initialized(llama_on_meta(CONFIG), seed=1)
    save_sharded(model, tmp_path)
    other = initialized(llama_on_meta(CONFIG), seed=2)
    load_sharded(other, tmp_path)
    assert digest(all_tensors(other)) == digest(all_tensors(model))
