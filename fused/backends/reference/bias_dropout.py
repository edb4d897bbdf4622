"""Reference formulas of bias + dropout (+ residual) with a given keep mask."""

from __future__ import annotations

import torch

from fused.backends.reference.activations import biased
from fused.backends.reference.numbers import compute_dtype, dropped, sum_over_rows

Tensor = torch.Tensor
Number = float | Tensor


def bias_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keep: Tensor | None, keep_scale: Number
) -> Tensor:
    """Compute residual + keep·keep_scale·(x + bias) in the dtype of this sum, rounding 16-bit numbers once.

    Args:
        x: ``[..., hidden]``.
        bias: ``[hidden]``, or None.
        residual: the shape of x, or None.
        keep: the shape of x, bool, or None for no dropout.
        keep_scale: factor of kept elements.
    """
    z, dtype = biased(x, bias)
    if residual is not None:
        dtype = torch.promote_types(dtype, residual.dtype)
        z = z.to(compute_dtype(dtype))
    if keep is not None:
        z = dropped(z, keep, keep_scale)
    if residual is not None:
        # The result of dropout is a new tensor, so it can be overwritten; the sum has the strides of its first operand.
        z = z.add_(residual) if keep is not None and z.stride() == residual.stride() else residual + z
    return z.to(dtype)


def bias_dropout_backward(
    g: Tensor,
    keep: Tensor | None,
    keep_scale: Number,
    *,
    x_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and the bias in these dtypes, or None for a dtype of None.

    The gradient of the residual is g itself.
    """
    dz = g.to(compute_dtype(g.dtype))
    if keep is not None:
        dz = dropped(dz, keep, keep_scale)
    dx = None if x_dtype is None else dz.to(x_dtype)
    return dx, None if bias_dtype is None else sum_over_rows(dz).to(bias_dtype)
