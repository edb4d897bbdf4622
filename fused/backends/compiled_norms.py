"""Norms written for the compiler, to compile to one loop over the rows.

In compiled code, a result of one number per row splits the loop in two unless it is itself a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused.backends.reference import adaptive_norm as adaptive
from fused.backends.reference import norms as formulas
from fused.backends.reference.norms import Casting
from fused.backends.reference.numbers import compute_dtype

Tensor = torch.Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, *, eps: float, casting: Casting
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute the reference formula of this name, with the sum of squares of each row as the last result."""
    total = None if residual is None else x + residual
    x = x if total is None else total
    squares = x.to(compute_dtype(x.dtype)).square().sum(-1, keepdim=True)
    normed = x.to(squares.dtype) * torch.rsqrt(squares / x.shape[-1] + eps)
    return formulas.scaled(normed, weight, casting, x.dtype), total, squares


def rms_norm_statistics(
    results: tuple[Tensor, Tensor | None, Tensor], args: Sequence[Tensor], *, eps: float, casting: Casting
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Replace the sum of squares in the results of `rms_norm` by the reciprocal RMS of each row."""
    normed, total, squares = results
    return normed, total, squares.div_(args[0].shape[-1]).add_(eps).rsqrt_()


def adaptive_layer_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the reference formula of this name, with the sums of each row and of its squares as the last results.

    The dimensions before the last are one here, or scale and shift would split the loop.
    """
    compute, columns = compute_dtype(x.dtype), x.shape[-1]
    scale, shift = (None if each is None else each.expand(x.shape).reshape(-1, columns) for each in (scale, shift))
    rows = x.reshape(-1, columns).to(compute)
    total = rows.sum(-1, keepdim=True)
    apart = rows - total / columns
    squares = apart.square().sum(-1, keepdim=True)
    y = adaptive.affine(apart * torch.rsqrt(squares / columns + eps), weight, bias)
    return adaptive.modulated(y, scale, shift).to(out_dtype).reshape(x.shape), total, squares


def adaptive_layer_norm_statistics(
    results: tuple[Tensor, Tensor, Tensor], args: Sequence[Tensor], *, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the sums in the results of `adaptive_layer_norm` by mean and 1/deviation of each row."""
    normed, total, squares = results
    columns, shape = args[0].shape[-1], (*args[0].shape[:-1], 1)
    return normed, total.div_(columns).view(shape), squares.div_(columns).add_(eps).rsqrt_().view(shape)
