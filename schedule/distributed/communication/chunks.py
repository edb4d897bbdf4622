"""Uneven sharding of a dimension, with the same bounds as ``torch.chunk`` and DTensor."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the begin and end of the shard of ``rank`` in a dimension of ``size``."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def part_of(tensor: Tensor, axis: int, parts: int, shares: int, share: int) -> Tensor:
    """Return shard ``share`` of ``shares`` of ``tensor`` along ``axis``.

    If ``axis`` packs several equal ``parts``, the result is the concatenation of this shard of each part.
    """
    if parts == 1:
        begin, end = chunk_bounds(tensor.shape[axis], shares, share)
        return tensor.narrow(axis, begin, end - begin).clone(memory_format=torch.contiguous_format)
    return torch.cat(tensor.chunk(parts * shares, axis)[share::shares], axis)
