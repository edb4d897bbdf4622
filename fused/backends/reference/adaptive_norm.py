"""Reference formulas of an adaptive layer norm: z = y·(1 + scale) + shift, where y is a layer norm.

The gradients of scale and shift are Σ g·y and Σ g over the dimensions that they are broadcast along; that of y is
g·(1 + scale).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fused.backends.reference import norms
from fused.backends.reference.numbers import compute_dtype, reduce_to
from fused.backends.tracing import is_compiled, needs_reference, watched

Tensor = torch.Tensor
Needs = tuple[bool, bool, bool, bool, bool]


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
    """Return the result, and mean and 1/deviation of the rows, ``[..., 1]``.

    Args:
        x: ``[..., hidden]``.
        scale, shift: broadcastable to x, or None.
        weight, bias: ``[hidden]`` or None.
    """
    compute = compute_dtype(x.dtype)
    y, _, mean, rstd = norms.layer_norm(x, None, weight, bias, eps=eps, out_dtype=compute)
    overwritten = not needs_reference((x, scale, shift, weight, bias))
    return modulated(y, scale, shift, y if overwritten else None).to(out_dtype), mean, rstd


def modulated(y: Tensor, scale: Tensor | None, shift: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Compute y·(1 + scale) + shift, into `out` if it is given."""
    factor = None if scale is None else 1 + scale.to(y.dtype)
    if shift is None:
        return y if factor is None else torch.mul(y, factor, out=out)
    shift = shift.to(y.dtype)
    return torch.add(y, shift, out=out) if factor is None else torch.addcmul(shift, y, factor, out=out)


def adaptive_layer_norm_backward(
    g: Tensor,
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, scale, shift, weight and bias, or None if not needed."""
    g = g.to(mean.dtype)
    of_scale = of_shift = None
    if needs[2] and shift is not None:
        of_shift = reduce_to(g, shift.shape).to(shift.dtype)
    if needs[1] and scale is not None:
        y = _normed(g, x, weight, bias, mean, rstd, eps)
        of_scale = reduce_to(g * y, scale.shape).to(scale.dtype)
    h = g if scale is None else g * (1 + scale.to(g.dtype))
    bias_dtype = bias.dtype if needs[4] and bias is not None else None
    of_rows = (needs[0], needs[3] and weight is not None)
    dx, of_weight, of_bias = norms.layer_norm_backward(
        h, None, x, weight, mean, rstd, bias_dtype=bias_dtype, needs=of_rows
    )
    return dx, of_scale, of_shift, of_weight, of_bias


def _normed(
    g: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, eps: float
) -> Tensor:
    """Compute y again, from the statistics or, to be differentiable again, from x."""
    x = x.to(mean.dtype)
    if torch.is_grad_enabled() or (watched((g, x)) and not is_compiled()):
        weight, bias = (None if row is None else row.to(x.dtype) for row in (weight, bias))
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = (x - mean) * rstd if is_compiled() else torch.addcmul(-mean * rstd, x, rstd)
    return affine(y, weight, bias)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute y·weight + bias, either of them optional."""
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)
