"""Reference formulas of RMS and layer norms, with or without a residual sum.

With x̂ the normalized rows and h = g·weight, the gradient of x is rstd·(h − x̂·mean(h·x̂)), for the layer norm minus
rstd·mean(h); the gradient of the weight is Σ_rows g·x̂. Statistics are float32 for 16-bit numbers.
"""

from __future__ import annotations

from typing import Literal

import torch

from fused.backends.reference.numbers import compute_dtype, sum_over_rows
from fused.backends.strides import in_memory_order
from fused.backends.tracing import is_compiled, needs_reference

Tensor = torch.Tensor
Casting = Literal["llama", "gemma", "torch"]
_aten = torch.ops.aten


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """Compute 1/√(mean(x²) + eps) of each row, ``[..., 1]``."""
    return torch.rsqrt(x.to(compute_dtype(x.dtype)).square().mean(-1, keepdim=True) + eps)


def factor(weight: Tensor, casting: Casting, dtype: torch.dtype) -> Tensor:
    """Return the factor of the normalized rows: the weight, or 1 + weight for Gemma."""
    return 1 + weight.to(dtype) if casting == "gemma" else weight.to(dtype)


def scaled(normed: Tensor, weight: Tensor | None, casting: Casting, dtype: torch.dtype) -> Tensor:
    """Multiply the normalized rows by the weight, with the cast to `dtype` before (Llama) or after it."""
    if weight is not None and casting == "llama":
        return weight * normed.to(dtype)
    if weight is not None:
        normed = normed * factor(weight, casting, normed.dtype)
    return normed.to(dtype)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, *, eps: float, casting: Casting
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the norm of x or of x + residual, this sum or None, and the reciprocal RMS of the rows."""
    total = None if residual is None else x + residual
    x = x if total is None else total
    rstd = reciprocal_rms(x, eps)
    return scaled(x.to(rstd.dtype) * rstd, weight, casting, x.dtype), total, rstd


def rms_norm_backward(
    g: Tensor,
    g_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    casting: Casting,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x (the sum, if there is one) and the weight, or None if not needed.

    Args:
        g_total: the incoming gradient of the sum, or None.
    """
    g = g.to(compute_dtype(g.dtype))
    normed = x.to(rstd.dtype) * rstd
    dx = dweight = None
    if needs[0]:
        h = g if weight is None else g * factor(weight, casting, rstd.dtype)
        dx = rstd * (h - normed * (h * normed).mean(-1, keepdim=True))
        dx = (dx if g_total is None else dx + g_total).to(x.dtype)
    if needs[1] and weight is not None:
        dweight = sum_over_rows(g * normed).to(weight.dtype)
    return dx, dweight


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the norm of x or of x + residual, this sum or None, and mean and 1/deviation of the rows."""
    total = None if residual is None else x + residual
    x = x if total is None else total
    compute = compute_dtype(x.dtype)
    # The CPU kernel computes in the dtype of the weight. Compilers and fake tensors do not model this.
    mixed = x.is_cpu and x.dtype == out_dtype != compute and not needs_reference((x, weight, bias))
    weight, bias = (None if tensor is None else tensor.to(compute) for tensor in (weight, bias))
    if mixed and weight is None:
        weight = x.new_ones(x.shape[-1:], dtype=compute)
    # The kernel has contiguous results, so it gets the rows in their order in memory.
    (rows,), back = in_memory_order([x if mixed else x.to(compute)], [x])
    results = _aten.native_layer_norm(rows, x.shape[-1:], weight, bias, eps)
    normed, mean, rstd = results if back is None else map(back, results)
    return normed.to(out_dtype), total, mean, rstd


def layer_norm_backward(
    g: Tensor,
    g_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    bias_dtype: torch.dtype | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x (the sum, if there is one), the weight and the bias, or None if not needed.

    Args:
        g_total: the incoming gradient of the sum, or None.
        bias_dtype: None if the bias needs no gradient.
    """
    g = g.to(mean.dtype)
    if is_compiled() and not torch.is_grad_enabled():
        return _written_out(g, g_total, x, weight, mean, rstd, bias_dtype, needs)
    # The kernel requires a weight and a bias, does not read the values of the bias, and no strides of the statistics.
    scale = g.new_ones(x.shape[-1:]) if weight is None else weight.to(mean.dtype)
    wanted = [needs[0], needs[1], bias_dtype is not None]
    dx, dweight, dbias = _aten.native_layer_norm_backward(
        g, x.to(mean.dtype), x.shape[-1:], mean.contiguous(), rstd.contiguous(), scale, scale, wanted
    )
    if needs[0]:
        dx = (dx if g_total is None else dx + g_total).to(x.dtype)
    return (
        dx if needs[0] else None,
        dweight.to(weight.dtype) if needs[1] and weight is not None else None,
        None if bias_dtype is None else dbias.to(bias_dtype),
    )


def _written_out(
    g: Tensor,
    g_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    bias_dtype: torch.dtype | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients without torch's kernel, to compile to one loop over the rows, and the sums."""
    normed = (x.to(mean.dtype) - mean) * rstd
    dx = None
    if needs[0]:
        h = g if weight is None else g * weight.to(mean.dtype)
        dx = rstd * (h - h.mean(-1, keepdim=True) - normed * (h * normed).mean(-1, keepdim=True))
        dx = (dx if g_total is None else dx + g_total).to(x.dtype)
    of_weight = sum_over_rows(g * normed).to(weight.dtype) if needs[1] and weight is not None else None
    return dx, of_weight, None if bias_dtype is None else sum_over_rows(g).to(bias_dtype)
