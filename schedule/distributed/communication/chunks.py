"""How a dimension is cut where the ranks cannot share it evenly: as ``torch.chunk`` cuts it, the way DTensor does."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Where the part of ``rank`` begins and ends in a dimension of ``size``."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def part_of(tensor: Tensor, axis: int, parts: int, shares: int, share: int) -> Tensor:
    """One of ``shares`` shares of ``axis``; of each of ``parts`` equal packed parts, one after another."""
    if parts == 1:
        begin, end = chunk_bounds(tensor.shape[axis], shares, share)
        return tensor.narrow(axis, begin, end - begin).clone(memory_format=torch.contiguous_format)
    return torch.cat(tensor.chunk(parts * shares, axis)[share::shares], axis)
