"""Norms written for the compiler, to compile to one loop over the rows.

In compiled code, a result of one number per row splits the loop in two unless it is itself a sum. A sum over the rows
splits it as well, with the second loop in the wrong order, and adds in a row. So compiled code sums blocks of rows, and
plain torch sums the blocks. torch's own layer norm sums the gradient of its weight in one pass without blocks, exactly
as eager torch does, but 16-bit numbers in 16 bits: it serves layer norms of float32 and float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused.backends.reference import adaptive_norm as adaptive
from fused.backends.reference import norms as formulas
from fused.backends.reference.norms import Casting
from fused.backends.reference.numbers import compute_dtype, sum_over_rows

Tensor = torch.Tensor

# Rows in a block: this many stay in the cache.
_BLOCK = 8


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
    """Compute the gradient of x, and the gradient of the weight summed over blocks of rows."""
    dx, _ = formulas.rms_norm_backward(g, g_total, x, weight, rstd, casting=casting, needs=(needs[0], False))
    return dx, _sum_blocks(g.to(rstd.dtype) * x.to(rstd.dtype) * rstd) if needs[1] else None


def rms_norm_sums(
    gradients: tuple[Tensor | None, Tensor | None],
    args: Sequence[Tensor],
    *,
    casting: Casting,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the weight from those of the compiled code."""
    dx, dweight = gradients
    return dx, _finished(dweight, args[3].dtype if needs[1] else None)


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
    """Compute the gradient of x, and for 16-bit numbers the others summed over blocks of rows."""
    by_torch = _torch_sums(g, x, mean)
    g = g.to(mean.dtype)
    normed = (x.to(mean.dtype) - mean) * rstd
    dx = None
    if needs[0]:
        h = g if weight is None else g * weight.to(mean.dtype)
        dx = rstd * (h - h.mean(-1, keepdim=True) - normed * (h * normed).mean(-1, keepdim=True))
        dx = (dx if g_total is None else dx + g_total).to(x.dtype)
    dweight = _sum_blocks(g * normed) if needs[1] and not by_torch else None
    return dx, dweight, None if bias_dtype is None or by_torch else _sum_blocks(g)


def layer_norm_sums(
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    args: Sequence[Tensor],
    *,
    bias_dtype: torch.dtype | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, the weight and the bias from those of the compiled code."""
    g, _, x, weight, mean, rstd = args
    dx, dweight, dbias = gradients
    if _torch_sums(g, x, mean) and (needs[1] or bias_dtype is not None):
        dweight, dbias = _sums(g, x, mean, rstd, (needs[1], bias_dtype is not None))
    return dx, _finished(dweight, weight.dtype if needs[1] else None), _finished(dbias, bias_dtype)


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


def _torch_sums(g: Tensor, x: Tensor, statistics: Tensor) -> bool:
    """Check whether torch's layer norm supports these dtypes and sums in the dtype of the statistics."""
    return g.dtype == x.dtype == statistics.dtype


def _sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    """Compute Σ_rows g·(x − mean)·rstd and Σ_rows g with torch's kernel."""
    ones = torch.ones(x.shape[-1:], dtype=mean.dtype, device=x.device)
    sums = torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, rstd, ones, ones, [False, *needs])
    return tuple(sums[1:])


def _sum_blocks(gradient: Tensor) -> Tensor:
    """Sum ``[rows, hidden]`` over blocks of rows to ``[blocks, hidden]``, the last of which may be shorter."""
    if gradient.ndim == 1:
        return gradient
    rows, hidden = gradient.shape
    rest = rows % _BLOCK
    blocks = gradient[: rows - rest].reshape(-1, _BLOCK, hidden).sum(1)
    return torch.cat((blocks, gradient[rows - rest :].sum(0, keepdim=True))) if rest else blocks


def _finished(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return sum_over_rows(gradient).to(dtype)
