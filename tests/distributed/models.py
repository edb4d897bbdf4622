"""Whole models on the meta device or not, and their shards by hand, for tests of what is built on top."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import schedule
from schedule.distributed import full_tensor
from tests.zoo import ARCHITECTURES


def on_meta(name: str) -> nn.Module:
    """A tiny model without data."""
    auto, config = ARCHITECTURES[name]
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config(), attn_implementation="eager")
    model.tie_weights()  # transformers 5.0 leaves that to the loading of weights
    return model


def initialized(model: nn.Module, seed: int = 0) -> nn.Module:
    """What one device does with a model on the meta device."""
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(seed)
    model.init_weights()
    return model


def llama(layers: int, width: int, hidden: int, vocabulary: int, heads: int = 8, kv_heads: int = 4) -> LlamaConfig:
    """A Llama configuration."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        use_cache=False,
        attn_implementation="eager",
    )


def llama_on_meta(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama without data."""
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(dtype)


def meta_ids(rows: int = 2, length: int = 6) -> dict[str, Tensor]:
    """A batch without data; the mask is whole, since transformers makes it by looking at data."""
    mask = torch.zeros(rows, 1, length, length, device="meta")
    return {"input_ids": torch.zeros(rows, length, dtype=torch.long, device="meta"), "attention_mask": mask}


def _rotates_on_meta() -> bool:
    try:
        llama_on_meta(llama(1, 8, 8, 8, heads=2, kv_heads=1))(**meta_ids())
    except RuntimeError:
        return False
    return True


needs_meta = pytest.mark.skipif(
    not _rotates_on_meta(), reason="this transformers asks for autocast on the meta device, which torch does not know"
)


def schedule_of(model: nn.Module, mesh: Any) -> Any:
    """A schedule of a model on the meta device."""
    return schedule.create_schedule(model, batch=meta_ids(), mesh=mesh)


def shard_llama(sch: Any) -> None:
    """Attention by heads, MLPs by columns and rows."""
    for layer in sch["model.layers.*"]:
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            layer[name].shard("weight", axis=0)
        for name in ("self_attn", "mlp"):
            layer[name].sync("bwd_post", "all_reduce")
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            layer[name].shard("weight", axis=1)
            layer[name].sync("fwd_post", "all_reduce")


def shard_gpt2(sch: Any) -> None:
    """Packed q, k and v by heads, MLPs by columns and rows."""
    for layer in sch["transformer.h.*"]:
        layer["attn.c_attn"].shard("weight", axis=1, parts=3)
        layer["attn.c_attn"].shard("bias", axis=0, parts=3)
        layer["mlp.c_fc"].shard("weight", axis=1)
        layer["mlp.c_fc"].shard("bias", axis=0)
        for name in ("attn.c_attn", "mlp.c_fc"):
            layer[name].sync("bwd_post", "all_reduce")
        for name in ("attn.c_proj", "mlp.c_proj"):
            layer[name].shard("weight", axis=0)
            layer[name].sync("fwd_post", "all_reduce")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and every byte, gathered where sharded; all ranks must call it."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = full_tensor(tensor.detach()).contiguous()
        found.update(f"{name} {whole.dtype} {list(whole.shape)}".encode())
        found.update(whole.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved as well."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
