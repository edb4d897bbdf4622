"""Checkpoint state of a gated first layer, stored as two separate halves for every tensor-parallel size.

A rank of a tensor-parallel group has a part of the gate above a part of the other half. Stored as one tensor, their
order depends on the size of the group; stored as two, a checkpoint written at one size loads at another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from fused.checks import shape
from fused.sharding import local_part

Tensor = torch.Tensor

# Megatron's names for the halves, of its `singleton_local_shards`.
GATE, UP = "_w", "_v"


@dataclass(frozen=True)
class ShardedTensorFactory:
    """Factory of the stored halves of a tensor, able to merge them again.

    Args:
        key: name in the state.
        data: ``[2·ffn, ...]``, the gate first; for a tensor-parallel layer this rank's share of each half.
        mesh: over which the halves are sharded, or None.
    """

    key: str
    data: Tensor
    mesh: DeviceMesh | None = None

    def build(self) -> dict[str, Tensor]:
        """Return the halves ``[ffn, ...]`` by key, as views, so loading into them writes to `data`."""
        gate, up = self.data.chunk(2, 0)
        return {self.key + GATE: on_mesh(gate, self.mesh, 0), self.key + UP: on_mesh(up, self.mesh, 0)}

    def merge(self, state: Mapping[str, Tensor]) -> Tensor:
        """Concatenate halves as returned by `build` to ``[2·ffn, ...]``, for DTensors to this rank's share."""
        halves = [state[self.key + GATE], state[self.key + UP]]
        return torch.cat([local_part(half) for half in halves])


def on_mesh(local: Tensor, mesh: DeviceMesh | None, axis: int) -> Tensor:
    """Wrap this rank's share of a tensor evenly sharded along `axis` as a DTensor in the same memory."""
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, mesh, [Shard(axis)], run_check=False)


def apply_swiglu_sharded_factory(
    key: str,
    tensor: Tensor,
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    mesh: DeviceMesh | None = None,
) -> ShardedTensorFactory:
    """Return the factory for a weight or bias of a gated first layer.

    Args:
        key: name in the state.
        tensor: ``[2·ffn, ...]``, the gate first; for a tensor-parallel layer this rank's ``[2·ffn / ranks, ...]``.
        sharded_offsets: must be empty; use `mesh` for a sharded tensor.
        mesh: the tensor-parallel ranks, or None.

    Raises:
        NotImplementedError: for offsets.
        TypeError: for a DTensor, which has both halves in one tensor.
        ValueError: if the first dimension is odd.

    Source: Megatron-LM ``core.transformer.mlp.apply_swiglu_sharded_factory``.
    """
    if sharded_offsets:
        raise NotImplementedError(
            f"apply_swiglu_sharded_factory: sharded_offsets {tuple(sharded_offsets)} place the state in a tensor of "
            "several layers, which is not there yet; give every layer a prefix of its own"
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise TypeError(
            f"apply_swiglu_sharded_factory: {key!r} is a {type(tensor).__name__}; give this rank's share as a plain "
            "tensor, and the mesh"
        )
    if tensor.ndim == 0 or tensor.shape[0] % 2:
        raise ValueError(f"apply_swiglu_sharded_factory: {key!r} {shape(tensor)} does not have two halves")
    return ShardedTensorFactory(key, tensor.detach(), mesh)
