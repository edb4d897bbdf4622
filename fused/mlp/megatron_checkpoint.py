"""State of an MLP in the format of Megatron's `dist_checkpointing`, made by Megatron's own functions.

Nothing here imports Megatron before such a state is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import nn

Offsets = Sequence[tuple[int, int, int]]


def layer_state(layer: Any, prefix: str, sharded_offsets: Offsets, metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return the parameters of a `fused.mlp.Linear` as Megatron's ``ShardedTensor`` objects, by name.

    Raises:
        NotImplementedError: if Megatron cannot be imported.

    Source: Megatron-LM ``core.transformer.utils.make_sharded_tensors_for_checkpoint``, which is called.
    """
    utils = _megatron("utils", sharded_offsets)
    state: dict[str, Any] = utils.make_sharded_tensors_for_checkpoint(
        layer.state_dict(prefix="", keep_vars=True),
        prefix,
        layer.cut,
        tuple(sharded_offsets),
        tp_group=layer.tp_group,
        dp_cp_group=utils.ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )
    return state


def mlp_state(
    mlp: nn.Module, gated: bool, prefix: str, sharded_offsets: Offsets, metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the states of an MLP's parts, the first layer's as factories of two halves if it is gated.

    Raises:
        NotImplementedError: if Megatron cannot be imported.

    Source: Megatron-LM ``core.transformer.mlp.MLP.sharded_state_dict``, whose functions are called.
    """
    utils, theirs = _megatron("utils", sharded_offsets), _megatron("mlp", sharded_offsets)
    offsets, metadata = tuple(sharded_offsets), utils.ensure_metadata_has_dp_cp_group(metadata)
    state: dict[str, Any] = {}
    for name, part in mlp.named_children():
        state |= utils.sharded_state_dict_default(part, f"{prefix}{name}.", offsets, metadata)
    if gated:
        groups = {"tp_group": getattr(mlp.linear_fc1, "tp_group", None), "dp_group": metadata["dp_cp_group"]}
        apart = metadata.get("singleton_local_shards", False)
        for key in (f"{prefix}linear_fc1.weight", f"{prefix}linear_fc1.bias"):
            if key in state:
                state[key] = theirs.apply_swiglu_sharded_factory(state[key], offsets, apart, **groups)
    return state


def _megatron(module: str, sharded_offsets: Offsets) -> Any:
    try:
        return importlib.import_module(f"megatron.core.transformer.{module}")
    except ImportError as error:
        raise NotImplementedError(
            f"sharded_state_dict: sharded_offsets {tuple(sharded_offsets)} or a metadata with dp_cp_group ask for the "
            "format of Megatron's dist_checkpointing, and megatron.core cannot be imported; install megatron-core, or "
            "give every layer a prefix of its own and neither of the two"
        ) from error
