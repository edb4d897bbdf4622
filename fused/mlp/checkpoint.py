"""The state of a gated first layer, in halves: each is a tensor of its own, whatever the tensor-parallel size.

A rank of a tensor-parallel group holds a part of the gate above a part of the other half. Kept as one tensor, these
are in another order for every size of the group; kept as two, a checkpoint written at one size loads at another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fused.checks import shape

Tensor = torch.Tensor

# Megatron's names for the halves, of its `singleton_local_shards`.
GATE, UP = "_w", "_v"


@dataclass(frozen=True)
class ShardedTensorFactory:
    """Cuts a tensor into what is stored, and puts it together again.

    Args:
        key: name in the state.
        data: ``[2·ffn, ...]``, the gate first.
    """

    key: str
    data: Tensor

    def build(self) -> dict[str, Tensor]:
        """The halves ``[ffn, ...]`` by their keys: views, so that what is loaded into them is in `data`."""
        gate, up = self.data.chunk(2, 0)
        return {self.key + GATE: gate, self.key + UP: up}

    def merge(self, state: Mapping[str, Tensor]) -> Tensor:
        """The tensor ``[2·ffn, ...]`` of halves as `build` gives them."""
        return torch.cat([state[self.key + GATE], state[self.key + UP]])


def apply_swiglu_sharded_factory(
    key: str, tensor: Tensor, sharded_offsets: Sequence[tuple[int, int, int]] = ()
) -> ShardedTensorFactory:
    """The factory for a weight or bias of a gated first layer.

    Args:
        key: name in the state.
        tensor: ``[2·ffn, ...]``, the gate first.
        sharded_offsets: must be empty on one device.

    Raises:
        NotImplementedError: for offsets, and for a tensor that is spread over ranks (a DTensor).
        ValueError: if the first dimension is odd.

    Source: Megatron-LM ``core.transformer.mlp.apply_swiglu_sharded_factory``.
    """
    check_one_device("apply_swiglu_sharded_factory", sharded_offsets)
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise NotImplementedError(
            f"apply_swiglu_sharded_factory: {key!r} is a {type(tensor).__name__}; only plain tensors can be cut yet. "
            "Save the whole tensor (.full_tensor())"
        )
    if tensor.ndim == 0 or tensor.shape[0] % 2:
        raise ValueError(f"apply_swiglu_sharded_factory: {key!r} {shape(tensor)} does not have two halves")
    return ShardedTensorFactory(key, tensor.detach())


def check_one_device(op: str, sharded_offsets: Sequence[tuple[int, int, int]]) -> None:
    """Raise NotImplementedError for offsets in a larger tensor."""
    if sharded_offsets:
        raise NotImplementedError(
            f"{op}: sharded_offsets {tuple(sharded_offsets)} place the state in a tensor of several layers or ranks, "
            "which is not there yet; give every layer a prefix of its own"
        )
