"""Bias + dropout (+ residual): the formulas, given what dropout keeps."""

from __future__ import annotations

import torch

from fused.backends.reference.activations import biased
from fused.backends.reference.numbers import compute_dtype, dropped

Tensor = torch.Tensor
Number = float | Tensor


def bias_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keep: Tensor | None, keep_scale: Number
) -> Tensor:
    """residual + keep·keep_scale·(x + bias), in the dtype of that sum; 16-bit numbers are rounded once.

    Args:
        x: ``[..., hidden]``.
        bias: ``[hidden]``, or None.
        residual: the shape of x, or None.
        keep: the shape of x, bool, or None for no dropout.
        keep_scale: what kept elements are multiplied with.
    """
    z, dtype = biased(x, bias)
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
        z = z.to(compute_dtype(dtype))
    if keep is not None:
        z = dropped(z, keep, keep_scale)
    if residual is not None:
        # What dropout has made is ours to write to.
        z = z + residual if keep is None else z.add_(residual)
    return z.to(dtype)


def bias_dropout_backward(
    g: Tensor,
    keep: Tensor | None,
    keep_scale: Number,
    *,
    x_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients for x and for the bias in these dtypes, None for none; the residual's is g itself."""
    dz = g.to(compute_dtype(g.dtype))
    if keep is not None:
        dz = dropped(dz, keep, keep_scale)
    dx = None if x_dtype is None else dz.to(x_dtype)
    return dx, None if bias_dtype is None else sum_over_rows(dz, bias_dtype)


def sum_over_rows(dz: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a bias ``[hidden]`` from the one of the sum, ``[..., hidden]``."""
    return (dz.sum(list(range(dz.ndim - 1))) if dz.ndim > 1 else dz).to(dtype)
