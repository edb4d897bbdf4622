"""Arithmetic shared by the formulas: which dtype to compute in, and how a broadcast is undone."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float32 for 16-bit numbers, else the dtype itself."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def reduce_to(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum a gradient over the dimensions along which a tensor of `shape` was broadcast."""
    leading = gradient.ndim - len(shape)
    dims = list(range(leading))
    dims += [
        dim for dim in range(leading, gradient.ndim) if shape[dim - leading] == 1 and gradient.shape[dim] != 1
    ]
    summed = gradient.sum(dims, keepdim=True) if dims else gradient
    return summed.squeeze(list(range(leading))) if leading else summed
