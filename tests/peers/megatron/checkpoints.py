"""The state of `fused.MLP` for Megatron's checkpoints equals that of Megatron's own MLP; run by ``__main__``.

Ranks are objects with a size and a rank alone, so that one process has the states of all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.transformer.mlp as theirs
import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import load, save
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import get_submodules
from megatron.core.transformer.transformer_config import TransformerConfig

import fused

OFFSETS = ((0, 1, 3),)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """Have Megatron's global groups, of one process."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()


def made(kind: type, group: Any, gated: bool, layers: str) -> Any:
    """Return one of the two MLPs, with Megatron's layers or those of `fused`."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        use_cpu_initialization=True,
    )
    parts = fused.MLPSubmodules() if layers == "fused" else get_submodules(get_gpt_layer_local_submodules().mlp)
    return kind(config, parts, ffn_hidden_size=config.ffn_hidden_size, tp_group=group)


def described(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint reads of each tensor, without its numbers and without the objects of no content."""
    apply_factories(state)
    flat = {}
    for name, one in state.items():
        flat |= {(name, i): each for i, each in enumerate(one if isinstance(one, list) else [one])}
    assert all(isinstance(one, ShardedTensor | ShardedObject) for one in flat.values())
    tensors = {name: one for name, one in flat.items() if isinstance(one, ShardedTensor)}
    return {name: dataclasses.replace(one, data=None) for name, one in tensors.items()}


@pytest.mark.parametrize("layers", ["Megatron", "fused"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("offsets", [(), OFFSETS])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_states_are_alike(layers: str, gated: bool, apart: bool, offsets: Any, ranks: int, rank: int) -> None:
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    metadata = {"singleton_local_shards": apart, "dp_cp_group": SimpleNamespace(size=lambda: 2, rank=lambda: 1)}
    states = [
        made(kind, group, gated, own).sharded_state_dict("mlp.", offsets, dict(metadata))
        for kind, own in ((theirs.MLP, "Megatron"), (fused.MLP, layers))
    ]
    expected, found = map(described, states)
    assert len(expected) == 4 + 2 * gated and found == expected


@pytest.mark.parametrize("layers", ["Megatron", "fused"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("offsets", [(), ((0, 0, 1),)])
@pytest.mark.parametrize("back", [False, True])
def test_one_loads_what_the_other_saved(tmp_path: Path, layers: str, gated: bool, offsets: Any, back: bool) -> None:
    group = parallel_state.get_tensor_model_parallel_group()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    pair = made(theirs.MLP, group, gated, "Megatron"), made(fused.MLP, group, gated, layers)
    saved, loaded = pair[::-1] if back else pair
    save(saved.sharded_state_dict("mlp.", offsets, metadata), tmp_path)
    assert not torch.equal(saved.linear_fc1.weight, loaded.linear_fc1.weight)
    lacks = back and layers == "fused"  # the empty extra state of Megatron's layers
    strict = StrictHandling.LOG_UNEXPECTED if lacks else StrictHandling.ASSUME_OK_UNEXPECTED
    state = load(loaded.sharded_state_dict("mlp.", offsets, metadata), tmp_path, strict=strict)
    loaded.load_state_dict({name.removeprefix("mlp."): value for name, value in state.items()}, strict=not lacks)
    for ours, other in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, other)
