"""What cannot be sharded or synchronized says why, and what to do; nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import schedule
from schedule.util.errors import ShardError
from tests.distributed import launch
from tests.distributed.blocks import Gated, Mlp, compare, gpt2_block, shard_attention, shard_mlp
from tests.distributed.test_undo import fingerprint


def scheduled_on(block: nn.Module, mesh: Any, width: int = 16) -> Any:
    return schedule.create_schedule(block, batch=torch.randn(2, 5, width), mesh=mesh)


def refused(sch: Any, message: str, action: Any) -> str:
    """The error of ``action(sch)``; everything stays as it was."""
    before = fingerprint(sch.root.module)
    with pytest.raises(ShardError, match=message) as caught:
        action(sch)
    assert fingerprint(sch.root.module) == before
    assert caught.value.fix, str(caught.value)
    return str(caught.value)


def what_to_shard(mesh: Any) -> None:
    sch = scheduled_on(Mlp(), mesh)
    text = refused(sch, "no parameter 'wieght'", lambda s: s["fc1"].shard("wieght", axis=0))
    assert "'weight', 'bias'" in text and "fc1" in text and "shard('wieght', 0)" in text
    refused(sch, "no axis 2", lambda s: s["fc1"].shard("weight", axis=2))
    refused(sch, "no axis -3", lambda s: s["fc1"].shard("weight", axis=-3))
    refused(sch, "no parameter 'weight'", lambda s: s["act"].shard("weight", axis=0))
    sch["fc1"].shard("weight", axis=0)
    refused(sch, "sharded already", lambda s: s["fc1"].shard("weight", axis=1))
    refused(sch, "same outputs", lambda s: s["fc1"].shard("bias", axis=0, parts=2))
    refused(sch, "same outputs, 0 and 4 of them common", lambda s: s["fc1"].shard("bias", axis=0, common=4))
    sch["fc2"].shard("weight", axis=1)
    refused(sch, "whole bias after the sum", lambda s: s["fc2"].shard("bias", axis=0))
    with pytest.raises(ShardError, match=r'the bias is whole: \.shard\("bias", axis=0\)'):
        sch.module(torch.randn(2, 5, 16))
    refused(scheduled_on(Mlp(16, 1), mesh), "fewer than the 2 ranks", lambda s: s["fc1"].shard("weight", axis=0))
    norm = scheduled_on(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), mesh)
    refused(norm, "LayerNorm has no sharded forward", lambda s: s["1"].shard("weight", axis=0))
    refused(norm, "a norm over shared features", lambda s: s["0"].shard("weight", axis=0))


def what_can_be_common(mesh: Any) -> None:
    sch = scheduled_on(Mlp(), mesh)
    refused(sch, "only outputs can be common", lambda s: s["fc1"].shard("weight", axis=1, common=2))
    refused(sch, "without parts or replicas", lambda s: s["fc1"].shard("weight", axis=0, parts=2, common=2))
    refused(sch, "32 outputs, 3 of them common, cannot be shared", lambda s: s["fc1"].shard("weight", axis=0, common=3))
    refused(sch, "32 outputs, -2 of them common", lambda s: s["fc1"].shard("weight", axis=0, common=-2))
    convolution = scheduled_on(nn.Sequential(nn.Conv1d(5, 16, 1)), mesh)
    refused(convolution, "common are for projections", lambda s: s["0"].shard("weight", axis=0, common=2))


def tied_weights(mesh: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(12, 16)
            self.head = nn.Linear(16, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(x)
            return result

    sparse = Tied()
    sparse.embed.sparse = True
    text = refused(scheduled_on(sparse, mesh), "tied to embed.weight", lambda s: s["head"].shard("weight", axis=0))
    assert "needs its whole table" in text
    sch = scheduled_on(Tied(), mesh)
    sch["head"].shard("weight", axis=0)
    assert sch.module.head.weight is sch.module.embed.weight
    refused(sch, "sharded already", lambda s: s["embed"].shard("weight", axis=0))

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.first(x) + self.second(x)
            return result

    block, twin = Twins(), Twins()
    twin.load_state_dict(block.state_dict())
    sch = scheduled_on(block, mesh)
    sch["first"].shard("weight", axis=0)
    assert block.first.weight is block.second.weight and block.second.out_features == 8
    for name in ("first", "second"):
        sch[name].sync("bwd_post", "all_reduce")
        sch[name].sync("fwd_post", "all_gather")
    compare(block, twin, 16)
    while sch.history:
        sch.undo()
    assert block.first.weight is block.second.weight


def contradictions(mesh: Any) -> None:
    sch = scheduled_on(Mlp(), mesh)
    refused(sch, "its weight is not sharded", lambda s: s["fc1"].sync("fwd_post", "all_reduce"))
    sch["fc1"].shard("weight", axis=0)
    sch["fc1"].shard("bias", axis=0)
    sch["fc2"].shard("weight", axis=1)
    text = refused(sch, "adding them up mixes features", lambda s: s["fc1"].sync("fwd_post", "all_reduce"))
    assert "all_gather" in text
    refused(sch, "partial sums, to be reduced", lambda s: s["fc2"].sync("fwd_post", "all_gather"))
    refused(sch, "mixes features", lambda s: s["fc2"].sync("bwd_post", "all_reduce"))
    refused(sch, "no mode 'post'", lambda s: s["fc1"].sync("post", "all_reduce"))
    refused(sch, "no collective 'reduce'", lambda s: s["fc2"].sync("fwd_post", "reduce"))
    refused(sch, "needs the axis", lambda s: s["fc2"].sync("fwd_post", "reduce_scatter"))
    refused(sch, "an all_reduce has no axis", lambda s: s["fc2"].sync("fwd_post", "all_reduce", axis=1))
    refused(sch, "whole on every rank", lambda s: s["fc1"].sync("fwd_pre", "all_reduce"))
    sch["fc2"].sync("fwd_post", "all_reduce")
    refused(sch, "has all_reduce already", lambda s: s["fc2"].sync("fwd_post", "reduce_scatter", axis=1))
    sch["fc1"].sync("fwd_pre", "all_gather", axis=1)
    refused(sch, "would do it twice", lambda s: s["fc1"].sync("bwd_post", "all_reduce"))
    refused(sch, "is not a projection", lambda s: s.sync("fwd_post", "all_reduce"))
    refused(sch, "synchronizes its own input", lambda s: s.sync("bwd_post", "all_reduce"))


def callers(mesh: Any) -> None:
    sch = scheduled_on(Gated(), mesh)
    refused(sch, "no column-parallel module", lambda s: s.sync("bwd_post", "all_reduce"))
    sch["gate"].shard("weight", axis=0)
    refused(sch, "used by up as well", lambda s: s.sync("bwd_post", "all_reduce"))
    sch["up"].shard("weight", axis=0)
    sch.sync("bwd_post", "all_reduce")
    refused(sch, "synchronizes its input already", lambda s: s["up"].sync("bwd_post", "all_reduce"))
    refused(sch, "has all_reduce already", lambda s: s.sync("bwd_post", "all_reduce"))


def heads(mesh: Any) -> None:
    """Three heads for two ranks; packed parts that were not said to be packed."""
    text = refused(
        scheduled_on(gpt2_block("attn"), mesh, 32),
        "splits the shared features into 3 pieces",
        lambda s: s["c_attn"].shard("weight", axis=1),
    )
    assert "parts=3" in text
    config = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=1, attn_implementation="eager")
    three = transformers.models.gpt2.modeling_gpt2.GPT2Attention(config, layer_idx=0)
    text = refused(scheduled_on(three, mesh, 24), "cannot be divided among 2 ranks", shard_attention)
    assert "(3, 8)" in text and "as many ranks as divide the heads" in text
    config.n_head = 1
    one = transformers.models.gpt2.modeling_gpt2.GPT2Attention(config, layer_idx=0)
    refused(scheduled_on(one, mesh, 24), "sums over shared features", shard_attention)
    packed = scheduled_on(gpt2_block("attn"), mesh, 32)
    packed["c_attn"].shard("weight", axis=1, parts=3)
    for op in ("all_gather", "dtensor"):
        refused(packed, "packed outputs side by side", lambda s, op=op: s["c_attn"].sync("fwd_post", op))
    refused(packed, "only the outputs of a column-parallel", lambda s: s["c_attn"].sync("bwd_post", "dtensor"))
    refused(
        scheduled_on(gpt2_block("attn"), mesh, 32),
        "96 outputs are not 5 parts",
        lambda s: s["c_attn"].shard("weight", axis=1, parts=5),
    )
    bare = schedule.create_schedule(gpt2_block("attn"), mesh=mesh)
    with pytest.raises(ShardError, match="followed through a recorded run"):
        shard_attention(bare)


def meshes(mesh: Any) -> None:
    two = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "mp"))
    with pytest.raises(ShardError, match='none is named "tp"'):
        scheduled_on(Mlp(), two)["fc1"].shard("weight", axis=0)
    named = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    sch = scheduled_on(Mlp(), named)
    shard_mlp(sch)
    assert sch.mesh is named and sch.module.fc1.weight.device_mesh.mesh_dim_names == ("tp",)
    sch.module(torch.randn(2, 5, 16)).sum().backward()
    alone = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    other = schedule.create_schedule(sch.module, batch=torch.randn(2, 5, 16), mesh=alone)
    refused(other, "of 2 ranks, and this schedule's mesh has .* of 1", lambda s: s["fc2"].shard("bias", axis=0))
    fresh = scheduled_on(Mlp(), mesh)
    refused(fresh, "the schedule's mesh is", lambda s: s.shard_plan(named))
    plan = fresh.shard_plan()
    plan.ranks = 4
    refused(fresh, "the plan is for 4 ranks and the mesh has 2", lambda s: s.apply_plan(plan))


CASES = [what_to_shard, what_can_be_common, tied_weights, contradictions, callers, heads, meshes]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(case: Any) -> None:
    launch.passes(case)


def test_without_a_mesh() -> None:
    sch = schedule.create_schedule(Mlp(), batch=torch.randn(2, 5, 16))
    with pytest.raises(ShardError, match="no mesh to shard over") as caught:
        sch["fc1"].shard("weight", axis=0)
    assert "init_device_mesh" in str(caught.value)


def test_something_else_as_a_mesh() -> None:
    sch = schedule.create_schedule(Mlp(), batch=torch.randn(2, 5, 16), mesh=object())
    with pytest.raises(ShardError, match="no object"):
        sch["fc1"].shard("weight", axis=0)


def test_without_a_process_group(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()
    sch = schedule.create_schedule(Mlp(), batch=torch.randn(2, 5, 16), mesh=mesh)
    with pytest.raises(ShardError, match="process group is not initialized"):
        sch["fc1"].shard("weight", axis=0)
