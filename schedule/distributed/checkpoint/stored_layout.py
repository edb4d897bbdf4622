"""Mapping from a rank's shard to the whole tensor, for tensor parallelism, packed parts, and FSDP on top."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fused.torch_internals.sharded import StridedShard
from schedule.util.errors import ShardError

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """A block contiguous both in the whole tensor and in this rank's shard.

    Attributes:
        whole: slices of the whole tensor.
        local: slices of this rank's shard.
    """

    whole: Slices
    local: Slices

    @property
    def offsets(self) -> torch.Size:
        """Offsets of the block in the whole tensor."""
        return torch.Size(part.start for part in self.whole)

    @property
    def sizes(self) -> torch.Size:
        """Sizes of the block."""
        return torch.Size(part.stop - part.start for part in self.whole)


@dataclass(frozen=True)
class Layout:
    """Layout of this rank's shard of a tensor.

    Attributes:
        shape: shape of the whole tensor.
        indices: axis → indices of the whole tensor held by this rank, in order; axes that are whole are left out.
    """

    shape: torch.Size
    indices: Mapping[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """Return the layout of a DTensor, or of a plain tensor as a whole tensor.

        Raises:
            ShardError: a placement is partial or unknown, or this rank is not part of the mesh.
        """
        if not isinstance(tensor, DTensor):
            return Layout(tensor.shape)
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if coordinate is None:
            raise ShardError("this rank is not part of the mesh", fix="build on the ranks of the mesh only")
        indices: dict[int, Tensor] = {}
        for dim in reversed(range(mesh.ndim)):  # tensor parallel first, then FSDP on what is left
            how = tensor.placements[dim]
            if isinstance(how, (Shard, StridedShard)):
                axis = how.dim % tensor.ndim
                parts = how.split_factor if isinstance(how, StridedShard) and axis not in indices else 1
                here = indices.get(axis, torch.arange(tensor.shape[axis]))
                indices[axis] = _chunk(here, int(parts), mesh.size(dim), coordinate[dim])
            elif not how.is_replicate():
                raise ShardError(f"{how} is not a sharding of a parameter", fix="shard parameters with sch.shard")
        layout = Layout(tensor.shape, indices)
        if layout.local_shape != tensor.to_local().shape:
            raise ShardError(f"a share of {list(tensor.to_local().shape)} placed as {tensor.placements} is not known")
        return layout

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's shard."""
        return torch.Size(len(self.indices[i]) if i in self.indices else n for i, n in enumerate(self.shape))

    def local(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of ``whole`` as a copy, or ``whole`` itself if no axis is sharded."""
        for axis, here in self.indices.items():
            whole = whole.index_select(axis, here.to(whole.device))
        return whole

    def pieces(self) -> Iterator[Piece]:
        """Yield the blocks of this rank's shard, or none if the shard is empty."""
        axes = [
            _runs(self.indices[axis]) if axis in self.indices else [(slice(0, size), slice(0, size))]
            for axis, size in enumerate(self.shape)
        ]
        for together in itertools.product(*axes):
            yield Piece(tuple(whole for whole, _ in together), tuple(local for _, local in together))


def _chunk(indices: Tensor, parts: int, ranks: int, rank: int) -> Tensor:
    shares = [part.chunk(ranks) for part in indices.chunk(parts)]
    return torch.cat([share[rank] if rank < len(share) else indices[:0] for share in shares])


def _runs(indices: Tensor) -> list[tuple[slice, slice]]:
    """Return the runs of consecutive indices as pairs (slice of the whole, slice of the shard)."""
    if not len(indices):
        return []
    breaks = (torch.diff(indices) != 1).nonzero().flatten() + 1
    begins, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(indices)]
    return [
        (slice(int(indices[begin]), int(indices[end - 1]) + 1), slice(begin, end))
        for begin, end in zip(begins, ends, strict=True)
    ]
