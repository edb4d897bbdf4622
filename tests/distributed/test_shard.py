"""Sharded blocks and models against their whole twins, on two gloo processes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fused
import schedule
from schedule.distributed import full_tensor
from tests.distributed import launch
from tests.distributed.blocks import (
    Gated,
    Mlp,
    compare,
    gpt2_block,
    observed,
    scheduled,
    shard_attention,
    shard_gated,
    shard_mlp,
)
from tests.needs import IS_OLD
from tests.zoo import batch, build


def bias_gelu(x: Any, bias: Any) -> Any:
    return nn.functional.gelu(x + bias)


def counted(block: nn.Module, width: int) -> dict[str, int]:
    """How many collectives of each kind a forward and backward take."""
    x = torch.randn(2, 5, width, requires_grad=True)
    with CommDebugMode() as seen:
        y = block(x)
        forward = seen.get_total_counts()
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    kinds = {str(kind).rpartition(".")[2]: count for kind, count in seen.get_comm_counts().items() if count}
    return {"forward": forward, "backward": seen.get_total_counts() - forward, **kinds}


def linear_mlp(mesh: Any) -> None:
    sch, twin = scheduled(Mlp(), mesh, shard_mlp, 16)
    compare(sch.module, twin, 16)
    assert counted(sch.module, 16) == {"forward": 1, "backward": 1, "all_reduce": 2}
    assert (sch["fc1"].module.out_features, sch["fc2"].module.in_features) == (16, 16)
    assert isinstance(sch.module.fc1.weight, DTensor) and sch.module.fc1.weight.to_local().shape == (16, 16)
    assert list(dict(sch.module.named_parameters())) == list(dict(twin.named_parameters()))


def without_bias(mesh: Any) -> None:
    sch, twin = scheduled(Mlp(bias=False), mesh, lambda sch: shard_mlp(sch, bias=False), 16)
    compare(sch.module, twin, 16)


def uneven_sizes(mesh: Any) -> None:
    sch, twin = scheduled(Mlp(16, 13), mesh, shard_mlp, 16)
    compare(sch.module, twin, 16)
    assert sch.module.fc1.out_features == (7, 6)[mesh.get_local_rank()]


def conv1d_mlp(mesh: Any) -> None:
    sch, twin = scheduled(gpt2_block("mlp"), mesh, lambda s: shard_mlp(s, "c_fc", "c_proj", 1), 32)
    compare(sch.module, twin, 32)
    assert counted(sch.module, 32) == {"forward": 1, "backward": 1, "all_reduce": 2}
    assert (sch.module.c_fc.nf, sch.module.c_proj.nx) == (64, 64)


def packed_attention(mesh: Any) -> None:
    sch, twin = scheduled(gpt2_block("attn"), mesh, shard_attention, 32)
    compare(sch.module, twin, 32)
    assert counted(sch.module, 32) == {"forward": 1, "backward": 1, "all_reduce": 2}
    assert sch.module.split_size == 16
    assert "split(16" in str(sch.graph.python_code("self").src)
    rank = mesh.get_local_rank()
    q = twin.c_attn.weight[:, :32].chunk(2, 1)[rank]
    assert torch.equal(sch.module.c_attn.weight.to_local()[:, :16], q)
    assert torch.equal(full_tensor(sch.module.c_attn.weight), twin.c_attn.weight)


def gated_mlp(mesh: Any) -> None:
    sch, twin = scheduled(Gated(), mesh, shard_gated, 16)
    compare(sch.module, twin, 16)
    assert counted(sch.module, 16) == {"forward": 1, "backward": 1, "all_reduce": 2}
    assert any("copy_to" in node.name for node in sch.graph.nodes)


def fused_inside(mesh: Any) -> None:
    """The bias of a sharded module fuses with the activation after it, on local tensors."""

    def apply(sch: Any) -> None:
        shard_mlp(sch)
        sch.fuse(sch.find(bias_gelu, expect=1))

    sch, twin = scheduled(Mlp(), mesh, apply, 16)
    targets = [node.target for node in sch.graph.nodes]
    assert fused.bias_activation in targets and "fc1" not in targets
    compare(sch.module, twin, 16)
    assert counted(sch.module, 16) == {"forward": 1, "backward": 1, "all_reduce": 2}
    with pytest.raises(schedule.ShardError, match="shard and sync first"):
        sch["fc1"].sync("fwd_post", "all_gather")


def gated_with_rules_after_it(mesh: Any) -> None:
    """Between the parts of the match the second projection reads its shard, which changes nothing."""

    def apply(sch: Any) -> None:
        shard_gated(sch)
        assert schedule.optimize(sch, cost_guard=False).applied

    block, twin = scheduled(Gated(), mesh, apply, 16)
    compare(block.module, twin, 16)


def fused_first(mesh: Any) -> None:
    with pytest.raises(schedule.ShardError, match="shard and sync first, then fuse"):
        scheduled(Mlp(), mesh, lambda sch: (sch.fuse(sch.find(bias_gelu)), shard_mlp(sch)), 16)


def gathered_output(mesh: Any) -> None:
    """A column-parallel module alone, its outputs side by side again; then a row-parallel one of a whole input."""

    def apply(sch: Any) -> None:
        sch["fc1"].shard("weight", axis=0)
        sch["fc1"].shard("bias", axis=0)
        sch["fc1"].sync("bwd_post", "all_reduce")
        sch["fc1"].sync("fwd_post", "all_gather")
        sch["fc2"].shard("weight", axis=-1)
        sch["fc2"].sync("fwd_pre", "scatter")
        sch["fc2"].sync("fwd_post", "all_reduce")

    for hidden in (32, 13):
        sch, twin = scheduled(Mlp(16, hidden), mesh, apply, 16)
        compare(sch.module, twin, 16)


def sequence_parallel(mesh: Any) -> None:
    """Each rank has half of the sequence before and after the block, and in its gradients."""

    def apply(sch: Any) -> None:
        sch["fc1"].shard("weight", axis=0)
        sch["fc1"].shard("bias", axis=0)
        sch["fc1"].sync("fwd_pre", "all_gather", axis=1)
        sch["fc2"].shard("weight", axis=1)
        sch["fc2"].sync("fwd_post", "reduce_scatter", axis=1)

    sch, twin = scheduled(Mlp(), mesh, apply, 16)
    x = torch.randn(2, 6, 16)
    whole = observed(twin, x)
    rank = mesh.get_local_rank()
    part = x.chunk(2, 1)[rank].clone().requires_grad_()
    y = sch.module(part)
    scale = torch.linspace(-1, 1, whole["output"].numel()).view_as(whole["output"])
    (y * scale.chunk(2, 1)[rank]).sum().backward()
    torch.testing.assert_close(y, whole["output"].chunk(2, 1)[rank])
    torch.testing.assert_close(part.grad, whole["input gradient"].chunk(2, 1)[rank])
    for name, parameter in sch.module.named_parameters():
        torch.testing.assert_close(full_tensor(parameter.grad), whole[name], rtol=1e-4, atol=1e-5)


def user_functions(mesh: Any) -> None:
    group = mesh.get_group().group_name

    def own_reduce(tensor: torch.Tensor) -> torch.Tensor:
        return schedule.distributed.reduce_from_tensor_parallel(tensor, group)

    def apply(sch: Any) -> None:
        sch["fc1"].shard("weight", axis=0)
        sch["fc1"].shard("bias", axis=0)
        sch["fc1"].sync("bwd_post", own_reduce)
        sch["fc2"].shard("weight", axis=1)
        sch["fc2"].sync("fwd_post", own_reduce)

    sch, twin = scheduled(Mlp(), mesh, apply, 16)
    compare(sch.module, twin, 16)


def training_steps(mesh: Any) -> None:
    """AdamW with clipping moves the sharded parameters as it moves the whole ones."""
    sch, twin = scheduled(Mlp(), mesh, shard_mlp, 16)
    sch.fuse(sch.find(bias_gelu, expect=1))
    start = {name: p.detach().clone() for name, p in twin.named_parameters()}
    for block in (sch.module, twin):
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2, foreach=True)
        for step in range(5):
            x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            block(x).square().mean().backward()
            norm = schedule.distributed.clip_grad_norm_(block.parameters(), 0.01)
            assert norm > 0.01
            with schedule.distributed.mixed_parameters():
                optimizer.step()
    for name, parameter in twin.named_parameters():
        ours = full_tensor(dict(sch.module.named_parameters())[name].detach())
        moved = (parameter - start[name]).abs().mean()
        assert moved > 1e-3 and (ours - parameter).abs().max() < 0.01 * moved, name


def state_dicts(mesh: Any) -> None:
    """Whole to sharded and back, to the bit; also between two sharded blocks."""
    sch, twin = scheduled(gpt2_block("attn"), mesh, shard_attention, 32)
    other = {name: torch.randn_like(tensor) for name, tensor in twin.state_dict().items()}
    sch.module.load_state_dict(other)
    saved = sch.module.state_dict()
    assert list(saved) == list(other)
    assert all(torch.equal(full_tensor(saved[name]), other[name]) for name in other)
    sch.module.load_state_dict({name: tensor.clone() for name, tensor in saved.items()})
    twin.load_state_dict({name: full_tensor(tensor) for name, tensor in saved.items()})
    compare(sch.module, twin, 32, shapes=((2, 5),))


def copies(mesh: Any) -> None:
    sch, twin = scheduled(gpt2_block("attn"), mesh, shard_attention, 32)
    twice = copy.deepcopy(sch.module)
    assert twice.c_attn.weight is not sch.module.c_attn.weight
    compare(twice, twin, 32, shapes=((2, 5),))
    compare(pickle.loads(pickle.dumps(sch.module)), twin, 32, shapes=((2, 5),))


def shard_gpt2(sch: Any) -> None:
    shard_attention(sch["transformer.h.*.attn"])
    shard_mlp(sch["transformer.h.*.mlp"], "c_fc", "c_proj", 1)


def shard_llama(sch: Any) -> None:
    for part, columns, row in (("self_attn", "qkv", "o_proj"), ("mlp", ("gate", "up"), "down_proj")):
        group = sch[f"model.layers.*.{part}"]
        for column in columns:
            group[f"{column}_proj"].shard("weight", axis=0)
        group.sync("bwd_post", "all_reduce")
        group[row].shard("weight", axis=1)
        group[row].sync("fwd_post", "all_reduce")


def shard_opt(sch: Any) -> None:
    attention = sch["model.decoder.layers.*.self_attn"]
    for name in ("q_proj", "k_proj", "v_proj"):
        attention[name].shard("weight", axis=0)
        attention[name].shard("bias", axis=0)
        attention[name].sync("bwd_post", "all_reduce")
    attention["out_proj"].shard("weight", axis=1)
    attention["out_proj"].sync("fwd_post", "all_reduce")
    shard_mlp(sch["model.decoder.layers.*"])


def whole_models(mesh: Any) -> None:
    """GPT-2, Llama (grouped queries) and OPT (head counts in attributes), every layer sharded."""
    for name, apply, backward in (("gpt2", shard_gpt2, 2), ("llama", shard_llama, 2), ("opt", shard_opt, 4)):
        model = build(name).eval()
        twin = copy.deepcopy(model)
        apply(schedule.create_schedule(model, batch=batch(name), mesh=mesh))
        for rows, length in ((2, 7), (3, 5)):
            given = batch(name, rows, length)
            losses = []
            for one in (model, twin):
                one.zero_grad()
                with CommDebugMode() as seen:
                    output = one(**given)
                    output.loss.backward()
                losses.append(output)
                assert seen.get_total_counts() == (2 * (2 + backward) if one is model else 0), name
            torch.testing.assert_close(losses[0].logits, losses[1].logits, rtol=1e-4, atol=1e-5)
            for key, parameter in twin.named_parameters():
                ours = full_tensor(dict(model.named_parameters())[key].grad)
                torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-5, msg=f"{name}: {key}")


def fused_attention(mesh: Any) -> None:
    """After the shard, the softmax of each rank's heads fuses as before."""

    def apply(sch: Any) -> None:
        shard_attention(sch)
        found = sch.find(masked if IS_OLD else scaled, expect=1)
        sch.fuse(found, compiler=None)

    def scaled(s: Any) -> Any:
        return nn.functional.softmax(s * schedule.scalar("scale"), dim=-1)

    def masked(s: Any, causal: Any, least: Any) -> Any:  # GPT-2 of transformers 5.0 masks its scores by itself
        return nn.functional.softmax(torch.where(causal, s, least), dim=-1)

    sch, twin = scheduled(gpt2_block("attn"), mesh, apply, 32)
    compare(sch.module, twin, 32)


def verified(mesh: Any) -> None:
    """verify passes what is right, on all ranks, and catches a missing reduction, forward or backward."""
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
    assert schedule.verify(sch, x)
    assert schedule.distributed.missing_syncs(sch.module) == []
    sch.undo()
    assert "fc2: nobody adds its partial sums" in schedule.distributed.missing_syncs(sch.module)[0]
    with pytest.raises(schedule.VerificationError, match="output"):
        schedule.verify(sch, x)

    def no_backward(sch: Any) -> None:
        sch["fc1"].shard("weight", axis=0)
        sch["fc1"].shard("bias", axis=0)
        sch["fc2"].shard("weight", axis=1)
        sch["fc2"].sync("fwd_post", "all_reduce")

    sch, _ = scheduled(Mlp(), mesh, no_backward, 16)
    assert "gradients of its input" in schedule.distributed.missing_syncs(sch.module)[0]
    with pytest.raises(schedule.VerificationError, match="input gradient"):
        schedule.verify(sch, x)


def compiled(mesh: Any) -> None:
    """torch.compile takes a sharded, fused block in one graph."""

    def apply(sch: Any) -> None:
        shard_mlp(sch)
        sch.fuse(sch.find(bias_gelu, expect=1))

    sch, twin = scheduled(Mlp(), mesh, apply, 16)
    run = torch.compile(sch.module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(run(x), twin(x), rtol=1e-4, atol=1e-5)


def generation(mesh: Any) -> None:
    """With a cache of this rank's heads."""
    for name, apply in (("gpt2", shard_gpt2), ("llama", shard_llama)):
        model = build(name).eval()
        twin = copy.deepcopy(model)
        apply(schedule.create_schedule(model, batch=batch(name), mesh=mesh))
        ids = batch(name, 1, 4)["input_ids"]
        ours, theirs = (one.generate(ids, max_new_tokens=4, do_sample=False) for one in (model, twin))
        assert torch.equal(ours, theirs)


def tagged(mesh: Any) -> None:
    """A tag is on whatever parameter is in its place, before, after and between shards."""
    sch = schedule.create_schedule(Mlp(), torch.randn(2, 5, 16), mesh)
    fc1 = sch["fc1"].module
    sch["fc1"].shard("weight", axis=0)
    sch.undo()
    sch["fc1"].annotate("weight", "decay", 0.0)
    sch["fc1"].annotate("weight", "placements_of_mine", "a")
    sch["fc1"].shard("weight", axis=0)
    assert isinstance(fc1.weight, DTensor) and (fc1.weight.decay, fc1.weight.placements_of_mine) == (0.0, "a")
    sch["fc1"].annotate("weight", "decay", 0.5)
    assert fc1.weight.decay == 0.5
    sch.undo()
    assert fc1.weight.decay == 0.0
    sch.undo()
    assert not isinstance(fc1.weight, DTensor) and fc1.weight.decay == 0.0
    sch.redo()
    assert isinstance(fc1.weight, DTensor) and fc1.weight.decay == 0.0
    tied = nn.ModuleDict({"one": nn.Linear(8, 8, bias=False), "two": nn.Linear(8, 8, bias=False)})
    tied["two"].weight = tied["one"].weight
    sch = schedule.create_schedule(tied, mesh=mesh)
    sch["two"].annotate("weight", "decay", 0.25)
    sch["one"].shard("weight", axis=0)
    assert tied["one"].weight is tied["two"].weight and tied["one"].weight.decay == 0.25


def tagged_then_undone_and_sharded_again(mesh: Any) -> None:
    """The sharded parameter is the same object again, its tags those of now."""
    sch = schedule.create_schedule(Mlp(), torch.randn(2, 5, 16), mesh)
    fc1 = sch["fc1"].module
    sch["fc1"].annotate("weight", "decay", 0.0)
    sch["fc1"].shard("weight", axis=0)
    sch.undo()
    sch.undo()
    assert not hasattr(fc1.weight, "decay")
    sch.redo()
    sch.redo()
    assert fc1.weight.decay == 0.0
    whole = nn.Linear(16, 32)
    sch.undo()
    sch["fc1"].replace(whole)
    sch["fc1"].shard("weight", axis=0)
    assert isinstance(whole.weight, DTensor) and whole.weight.decay == 0.0


CASES = [
    tagged, tagged_then_undone_and_sharded_again,
    linear_mlp, without_bias, uneven_sizes, conv1d_mlp, packed_attention, gated_mlp, fused_inside, fused_first,
    gated_with_rules_after_it,
    gathered_output, sequence_parallel, user_functions, training_steps, state_dicts, copies, whole_models,
    fused_attention, verified, compiled, generation,
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    launch.passes(case)
