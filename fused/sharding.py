"""DTensor inputs of the ops: run on the local shards, and wrap the result with the resulting placements.

Nothing is gathered unless the op needs an unsharded dimension, or one mesh dimension shards two different
dimensions of the operands (a batch-sharded input with an FSDP-sharded bias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def sharded(*tensors: torch.Tensor | None) -> bool:
    """Check whether one of the tensors is a DTensor."""
    candidates = [tensor for tensor in tensors if tensor is not None and type(tensor) not in _PLAIN]
    return bool(candidates) and any(map(is_dtensor, candidates))


@dataclass
class Local:
    """Local shards of an op's operands, with the placements to wrap its result as a DTensor."""

    x: torch.Tensor
    others: list[torch.Tensor | None]
    mesh: Any = None
    placements: Sequence[Placement] = ()
    shape: tuple[int, ...] = ()

    def given(self, index: int) -> torch.Tensor:
        """Return one of the other operands, or raise ValueError if it is None."""
        other = self.others[index]
        if other is None:
            raise ValueError(f"operand {index} is None")
        return other

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap a result of x's local shape as a DTensor of x's global shape, unless x is plain."""
        if self.mesh is None:
            return local
        from torch.distributed.tensor import DTensor

        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * max(size, 1))
        return DTensor.from_local(
            local.contiguous(),
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )

    def offset(self, dim: int) -> int:
        """Return the start of the local shard of x along a dimension."""
        if self.mesh is None:
            return 0
        from fused.torch_internals.sharded import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return int(offsets[dim])


def localise(op: str, x: torch.Tensor, others: Sequence[torch.Tensor | None], whole: Sequence[int] = ()) -> Local:
    """Return the local shards of x and of other tensors broadcasting to it.

    A plain x is treated as a local shard, and DTensors among `others` are converted to their local shards. Plain
    `others` with a DTensor x are treated as replicated. A partial sum in x is reduced first: the ops are not linear.

    Args:
        op: name for errors.
        x: the tensor whose shape the result has.
        others: None, or tensors broadcastable to x.
        whole: dimensions of x that must not be sharded.

    Raises:
        ValueError: if the operands are on different meshes.
    """
    if not is_dtensor(x):
        return Local(x, [_to_local(other) for other in others])
    spread_x: DTensor = x  # type: ignore[assignment]
    mesh = spread_x.device_mesh
    spread: list[DTensor | None] = []
    for other in others:
        spread.append(None if other is None else _as_dtensor(op, other, mesh))
    targets = _placements(spread_x, spread, [dim % x.ndim for dim in whole])
    if tuple(targets) != tuple(spread_x.placements):
        spread_x = spread_x.redistribute(placements=targets)
    local_others = [None if other is None else _local_operand(x, other, targets, mesh) for other in spread]
    return Local(spread_x.to_local(grad_placements=targets), local_others, mesh, targets, tuple(x.shape))


def _placements(x: DTensor, others: Sequence[DTensor | None], whole: Sequence[int]) -> list[Placement]:
    """Return the placements for x: replicated if required, else sharded if x or another operand is sharded."""
    from torch.distributed.tensor import Replicate, Shard

    targets: list[Placement] = []
    for mesh_dim, placement in enumerate(x.placements):
        target: Placement = Replicate()
        if isinstance(placement, Shard):
            if placement.dim % x.ndim not in whole:
                target = Shard(placement.dim % x.ndim)
        elif placement.is_replicate():
            for other in others:
                cut = other.placements[mesh_dim] if other is not None else None
                if other is None or not isinstance(cut, Shard) or other.shape[cut.dim] == 1:
                    continue
                dim = cut.dim % other.ndim + x.ndim - other.ndim
                if dim not in whole:
                    target = Shard(dim)
                    break
        targets.append(target)
    return targets


def _local_operand(x: torch.Tensor, other: DTensor, x_placements: Sequence[Placement], mesh: Any) -> torch.Tensor:
    """Return the part of `other` for the local shard of x, with a partial gradient if it is broadcast."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements: list[Placement] = []
    gradients: list[Placement] = []
    for placement in x_placements:
        if not isinstance(placement, Shard):
            placements.append(Replicate())
            gradients.append(Replicate())
            continue
        dim = placement.dim - (x.ndim - other.ndim)
        if dim < 0 or (other.shape[dim] == 1 and x.shape[placement.dim] != 1):
            placements.append(Replicate())
            gradients.append(Partial())
        else:
            placements.append(Shard(dim))
            gradients.append(Shard(dim))
    if tuple(placements) != tuple(other.placements):
        other = other.redistribute(mesh, placements)
    return other.to_local(grad_placements=gradients)


def _as_dtensor(op: str, tensor: torch.Tensor, mesh: Any) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tensor.device_mesh != mesh:
        raise ValueError(f"{op}: the operands are on two meshes, {mesh} and {tensor.device_mesh}")
    return tensor


def _to_local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None else local_part(tensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or any other tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def placed_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a DTensor if ``like`` is one, else as this rank's part."""
    return _as_dtensor("", tensor, like.device_mesh) if is_dtensor(like) else local_part(tensor)  # type: ignore[attr-defined]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole ``tensor`` on every rank. All ranks must call it. A plain tensor is returned as is."""
    if not is_dtensor(tensor):
        return tensor
    from fused.torch_internals.sharded import with_literal_placements

    gathered: torch.Tensor = with_literal_placements(tensor).full_tensor()  # type: ignore[arg-type]
    return gathered


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Check whether a tensor is a DTensor, whose module takes long to import, without importing it for plain ones."""
    if type(tensor) in _PLAIN:
        return False
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
