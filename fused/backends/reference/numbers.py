"""Arithmetic shared by the formulas: compute dtypes, dropout, rounding, and sums over broadcast dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fused.backends.tracing import is_compiled

_BLOCK = 8  # float32 numbers that compiled code adds in a row,
_LANES = 16  # and rows of them side by side, where they follow each other in memory


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate in: float32 for 16-bit numbers, else the dtype itself."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def autocast_norm_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of torch's layer and group norms of a dtype: float32 under CUDA autocast."""
    is_wide = dtype.itemsize < 4 and device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return torch.float32 if is_wide else dtype


def beside(of_channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape ``[channels]`` or ``[samples, channels]`` so that it broadcasts with x, ``[samples, channels, ...]``."""
    return of_channels.reshape(-1, x.shape[1], *(1,) * (x.ndim - 2))


def dropped(z: torch.Tensor, keep: torch.Tensor, keep_scale: float | torch.Tensor) -> torch.Tensor:
    """Apply dropout to z by multiplication: as in eager torch, a dropped NaN or infinity is NaN."""
    if not is_compiled():
        keep = keep.view(torch.uint8)  # three times as fast to multiply as booleans
    return (z * keep).mul_(keep_scale)


def reduce_to(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Sum a gradient over the broadcast dimensions of a tensor of `shape`."""
    leading = gradient.ndim - len(shape)
    dims = list(range(leading))
    dims += [dim for dim in range(leading, gradient.ndim) if shape[dim - leading] == 1 and gradient.shape[dim] != 1]
    summed = sum_over(gradient, dims, keepdim=True)
    return summed.squeeze(list(range(leading))) if leading else summed


def sum_over(x: torch.Tensor, dims: list[int] | tuple[int, ...], *, keepdim: bool = False) -> torch.Tensor:
    """Sum over the dimensions, if any, as exactly as plain torch does.

    Plain torch adds float32 numbers in pairs. Compiled code for the CPU adds them in a row, over all rows for each
    column: so it sums blocks, which stay in the cache, and then the sums of these in float64.
    """
    if not dims:
        return x
    if not is_compiled() or not x.is_cpu or x.dtype != torch.float32:
        return x.sum(dims, keepdim=keepdim)
    dim = max(each % x.ndim for each in dims)
    size = _BLOCK * _LANES if dim == x.ndim - 1 else _BLOCK
    blocks = x.shape[dim] // size
    if blocks < 2:
        return x.sum(dims, keepdim=keepdim, dtype=torch.float64).float()
    whole, rest = x.split((blocks * size, x.shape[dim] - blocks * size), dim)
    total = whole.unflatten(dim, (blocks, size)).sum(dim + 1).sum(dims, keepdim=keepdim, dtype=torch.float64)
    if rest.shape[dim]:
        total = total + rest.sum(dims, keepdim=keepdim, dtype=torch.float64)
    return total.float()


def sum_over_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum ``[..., columns]`` over rows to ``[columns]``."""
    return sum_over(x, tuple(range(x.ndim - 1)))


def with_block_sums(function: Callable[..., Sequence[torch.Tensor | None]], *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Compute an elementwise d, *terms = function(*tensors) of rows, and add the terms of each block of rows.

    For the compiler: it computes d and the sums of a block in one loop, where it would else compute d once more.

    Args:
        tensors: each ``[rows, columns]``. Results of the function may be None.

    Returns:
        d, and for each term ``[rows / 8, columns]``, or the terms themselves of rows that are not a multiple of 8.
    """
    rows, columns = tensors[0].shape[0], tensors[0].shape[1:]
    if not columns or rows % _BLOCK:
        return tuple(function(*tensors))
    in_blocks = (each.view(rows // _BLOCK, _BLOCK, *columns).unbind(1) for each in tensors)
    of_d, *of_terms = zip(*(function(*of_blocks) for of_blocks in zip(*in_blocks, strict=True)), strict=True)
    d = None if of_d[0] is None else torch.stack(of_d, 1).view(rows, *columns)
    return d, *(None if terms[0] is None else functools.reduce(torch.add, terms) for terms in of_terms)


def rounded_to(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast float32 numbers from 0 to 1 to a 16-bit dtype and back."""
    if not is_compiled():
        return p.to(dtype).to(p.dtype)
    # A compiler may remove such a pair of casts, so round the bits: to the nearest, ties to even.
    dropped = 23 + round(math.log2(torch.finfo(dtype).eps))
    bits = p.view(torch.int32)
    bits = bits + (2 ** (dropped - 1) - 1) + ((bits >> dropped) & 1)
    rounded = (bits >> dropped << dropped).view(torch.float32)
    if dtype == torch.float16:
        # Below the normal numbers float16 has steps of 2⁻²⁴, as float32 has between ½ and 1.
        rounded = torch.where(p < 2**-14, (p + 0.75) - 0.75, rounded)
    return rounded
