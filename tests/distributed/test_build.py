"""``build``: models on the meta device, initialized or read shard by shard, with the weights of one device."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

import schedule
from schedule.distributed import full_tensor
from tests.distributed import launch
from tests.distributed.models import (
    all_tensors,
    digest,
    initialized,
    llama,
    llama_on_meta,
    meta_ids,
    needs_meta,
    on_meta,
    schedule_of,
    shard_gpt2,
    shard_llama,
)
from tests.zoo import ARCHITECTURES, batch

SMALL = llama(2, 32, 64, 96)

# -- one process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_of_one_device(name: str) -> None:
    model, twin = on_meta(name), initialized(on_meta(name), seed=5)
    kept = dict(model.named_parameters(remove_duplicate=False))
    torch.manual_seed(5)
    built = schedule.build(schedule.create_schedule(model))
    assert built is model and digest(all_tensors(model)) == digest(all_tensors(twin))
    assert all(kept[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    inputs = batch(name)
    assert torch.equal(model.eval()(**inputs).logits, twin.eval()(**inputs).logits)


def test_buffers_are_those_of_a_model_made_at_once() -> None:
    made = LlamaForCausalLM(SMALL)
    built = schedule.build(schedule.create_schedule(llama_on_meta(SMALL)))
    assert built.model.rotary_emb.inv_freq.abs().sum() > 0
    assert digest(dict(built.named_buffers())) == digest(dict(made.named_buffers()))


class Net(nn.Module):
    """Modules of torch, two of them tied, in the order of their making."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8))
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).transpose(1, 2)
        return self.last(self.attention(x, x, x)[0] + self.first(x))


def test_modules_of_torch_are_reset_in_the_order_of_their_making() -> None:
    with torch.device("meta"):
        model = Net()
    model.last.weight.decay = 0.5  # type: ignore[attr-defined]
    torch.manual_seed(2)
    schedule.build(schedule.create_schedule(model))
    assert model.last.weight is model.first.weight and model.first.weight.decay == 0.5
    torch.manual_seed(2)
    twin = Net()
    for name in ("stem.0.weight", "stem.0.bias", "stem.1.running_var", "first.bias", "attention.in_proj_weight"):
        assert torch.equal(all_tensors(model)[name], all_tensors(twin)[name]), name


def test_a_function_of_the_users() -> None:
    with torch.device("meta"):
        model = Net()

    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(0.25)

    schedule.build(schedule.create_schedule(model), init_weights=init)
    assert all((tensor.float() - 0.25).abs().max() <= 0.25 for tensor in all_tensors(model).values())
    assert isinstance(model(torch.ones(2, 4, 6)), torch.Tensor)


def test_what_has_data_keeps_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    before = model[0].weight.clone()
    schedule.build(schedule.create_schedule(model))
    assert torch.equal(model[0].weight, before) and not model[1].weight.is_meta
    schedule.build(schedule.create_schedule(model))


class Odd(nn.Module):
    """A parameter that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        (Odd, None, "nothing initializes scale"),
        (lambda: nn.Linear(2, 2), lambda module: None, "no tensor is on the meta device"),
        (Odd, 3, "a function or a path, not int"),
        (Odd, "/nowhere/at/all", "there are no weights at"),
    ],
)
def test_what_cannot_be_built_is_refused(model: Any, weights: Any, message: str) -> None:
    sch = schedule.create_schedule(model())
    with pytest.raises(schedule.ScheduleError, match=message):
        schedule.build(sch, init_weights=weights)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_weights_from_a_folder(name: str, tmp_path: Path) -> None:
    twin = initialized(on_meta(name), seed=7)
    twin.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.manual_seed(9)
    model = schedule.build(schedule.create_schedule(on_meta(name)), init_weights=tmp_path)
    after = torch.rand(1)
    assert digest(all_tensors(model)) == digest(all_tensors(twin))
    torch.manual_seed(9)
    assert torch.equal(after, torch.rand(1))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    initialized(llama_on_meta(SMALL)).save_pretrained(tmp_path)
    sch = schedule.create_schedule(llama_on_meta(llama(3, 32, 64, 96)))
    with pytest.raises(schedule.NotApplicable, match=r"the checkpoint has no model\.layers\.2"):
        schedule.build(sch, init_weights=tmp_path)
    sch = schedule.create_schedule(llama_on_meta(llama(2, 32, 48, 96)))
    with pytest.raises(schedule.NotApplicable, match=r"\[64, 32\] in the checkpoint and .* \[48, 32\] in the model"):
        schedule.build(sch, init_weights=tmp_path)


# -- several processes ------------------------------------------------------------------------------------------


def sharded(model: nn.Module, mesh: Any, shard: Any) -> Any:
    sch = schedule_of(model, mesh)
    shard(sch)
    return sch


def initialized_in_shards(mesh: Any) -> None:
    for shard, make in ((shard_llama, lambda: llama_on_meta(SMALL)), (shard_gpt2, lambda: on_meta("gpt2"))):
        twin = initialized(make(), seed=3)
        sch = sharded(make(), mesh, shard)
        torch.manual_seed(3)
        model = schedule.build(sch)
        assert digest(all_tensors(model)) == digest(all_tensors(twin))
        ids = torch.arange(10).view(2, 5)
        model.eval()
        twin.eval()
        ours, theirs = model(input_ids=ids, use_cache=False).logits, twin(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(
                full_tensor(p.grad), q.grad, rtol=1e-3, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
            )


def whole_with_its_own_share(mesh: Any) -> None:
    """Packed queries with one key and value: the parameter is whole on every rank, what it computes is not."""
    model, twin = on_meta("falcon"), initialized(on_meta("falcon"))
    sch = schedule.create_schedule(model, batch=meta_ids(2, 8), mesh=mesh)
    plan = sch.shard_plan(sequence=True)
    assert any(step.common for step in plan.shards)
    sch.apply_plan(plan)
    torch.manual_seed(0)
    schedule.build(sch)
    assert digest(dict(model.named_parameters())) == digest(dict(twin.named_parameters()))
    ids = batch("falcon", 2, 8)["input_ids"]
    torch.testing.assert_close(model.eval()(ids).logits, twin.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def undone_after_building(mesh: Any) -> None:
    sch = sharded(llama_on_meta(SMALL), mesh, shard_llama)
    torch.manual_seed(3)
    model = schedule.build(sch)
    while sch.history:
        sch.undo()
    twin = initialized(llama_on_meta(SMALL), seed=3)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert digest(all_tensors(model)) == digest(all_tensors(twin))


def read_in_shards(mesh: Any) -> None:
    for name, shard in (("llama", shard_llama), ("gpt2", shard_gpt2)):
        make = (lambda: llama_on_meta(SMALL)) if name == "llama" else (lambda: on_meta("gpt2"))
        twin = initialized(make(), seed=4)
        folder = shared_folder()
        if dist.get_rank() == 0:
            twin.save_pretrained(folder / "hf", max_shard_size="20KB")
        dcp.save(dict(twin.state_dict()), checkpoint_id=folder / "dcp")
        dist.barrier()
        for kind in ("hf", "dcp"):
            model = schedule.build(sharded(make(), mesh, shard), init_weights=folder / kind)
            assert digest(all_tensors(model)) == digest(all_tensors(twin)), (name, kind)


def shared_folder() -> Path:
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0]))


Big = tuple[int, int, int, int, int, torch.dtype]
HUNDRED_MILLION: Big = (8, 1024, 2816, 16000, 8, torch.float32)
BILLION: Big = (22, 2048, 5632, 32000, 32, torch.bfloat16)


def big(size: Big) -> nn.Module:
    """A Llama without data: layers, width, MLP, vocabulary, heads, dtype."""
    *shape, heads, dtype = size
    return llama_on_meta(llama(*shape, heads=heads, kv_heads=heads), dtype)


def bounded_build(mesh: Any, size: Big, folder: Path) -> None:
    """A rank needs its share, about the largest module, and what the allocator adds; writes a hash of the weights."""
    sch = sharded(big(size), mesh, shard_llama)
    model = sch.module
    share = sum(nbytes(p.to_local() if isinstance(p, DTensor) else p) for p in model.parameters())
    largest = max(sum(nbytes(p) for p in m.parameters(recurse=False)) for m in model.modules())
    whole = sum(map(nbytes, model.parameters()))
    torch.manual_seed(1)
    dist.barrier()
    before = reset_peak()
    schedule.build(sch)
    peak = peak_rss() - before
    print(
        f"rank {dist.get_rank()}: peak {peak / 2**20:.0f} MiB, share {share / 2**20:.0f}, largest {largest / 2**20:.0f}"
    )
    assert peak < 1.05 * (share + largest) + 32 * 2**20 < whole, (peak, share, largest, whole)
    (folder / f"rank{dist.get_rank()}").write_text(digest(dict(model.named_parameters())))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def reset_peak() -> int:
    """Forget the peak of resident memory; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss()


def peak_rss() -> int:
    """The peak of this process's resident memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


CASES = (initialized_in_shards, whole_with_its_own_share, undone_after_building, read_in_shards)


@needs_meta
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_processes(case: launch.Case) -> None:
    launch.passes(case)


@needs_meta
@pytest.mark.parametrize(
    "size",
    [pytest.param(HUNDRED_MILLION, id="100M"), pytest.param(BILLION, id="1B", marks=pytest.mark.slow)],
)
def test_memory_of_a_rank_is_bounded(size: Big, tmp_path: Path) -> None:
    """Over four processes; and the weights are those that this one process makes alone."""
    launch.passes(partial(bounded_build, size=size, folder=tmp_path), ranks=4, limit=580)
    hashes = {path.read_text() for path in tmp_path.iterdir()}
    assert hashes == {digest(dict(initialized(big(size), seed=1).named_parameters()))}
    assert len(list(tmp_path.iterdir())) == 4
