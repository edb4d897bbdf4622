"""The norms for the compiler: in one loop over the rows, without what would make it two.

Compiled, a result of one number a row that is not itself a sum splits the loop. So does a sum over the rows, with a
second one in the wrong order. torch's own layer norm sums the gradient of
its weight row by row, and with a mean of 0 that is the one of the RMS norm; but 16-bit numbers it adds in 16 bits. Of
those, compiled code sums blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fused.backends.reference import norms as formulas
from fused.backends.reference.norms import Casting
from fused.backends.reference.numbers import compute_dtype

Tensor = torch.Tensor

# Rows in a block: so many stay in the cache.
_BLOCK = 16


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, *, eps: float, casting: Casting
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As the reference formula of this name, but for the last result: the sum of squares of each row."""
    total = None if residual is None else x + residual
    x = x if total is None else total
    squares = x.to(compute_dtype(x.dtype)).square().sum(-1, keepdim=True)
    normed = x.to(squares.dtype) * torch.rsqrt(squares / x.shape[-1] + eps)
    return formulas.scaled(normed, weight, casting, x.dtype), total, squares


def rms_norm_statistics(
    results: tuple[Tensor, Tensor | None, Tensor], args: Sequence[Tensor], *, eps: float, casting: Casting
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The results of `rms_norm`, with the reciprocal RMS of each row."""
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
    """The gradient for x; and for 16-bit numbers, the one for the weight, summed over blocks of rows."""
    dx, _ = formulas.rms_norm_backward(g, g_total, x, weight, rstd, casting=casting, needs=(needs[0], False))
    if not needs[1] or _torch_sums(g, x, rstd):
        return dx, None
    return dx, _sum_blocks(g.to(rstd.dtype) * x.to(rstd.dtype) * rstd)


def rms_norm_sums(
    gradients: tuple[Tensor | None, Tensor | None],
    args: Sequence[Tensor],
    *,
    casting: Casting,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients for x and for the weight."""
    g, _, x, weight, rstd = args
    dx, dweight = gradients
    if needs[1] and dweight is None:
        dweight = _sums(g, x, torch.zeros_like(rstd), rstd, (True, False))[0]
    return dx, _finished(dweight, weight.dtype if needs[1] else None)


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
    """The gradient for x; and for 16-bit numbers, the others, summed over blocks of rows."""
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
    """The gradients for x, the weight and the bias."""
    g, _, x, weight, mean, rstd = args
    dx, dweight, dbias = gradients
    if _torch_sums(g, x, mean) and (needs[1] or bias_dtype is not None):
        dweight, dbias = _sums(g, x, mean, rstd, (needs[1], bias_dtype is not None))
    return dx, _finished(dweight, weight.dtype if needs[1] else None), _finished(dbias, bias_dtype)


def _torch_sums(g: Tensor, x: Tensor, statistics: Tensor) -> bool:
    """Whether torch's layer norm takes these dtypes, and sums in the one of the statistics."""
    return g.dtype == x.dtype == statistics.dtype


def _sums(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    """Σ_rows g·(x − mean)·rstd and Σ_rows g."""
    ones = torch.ones(x.shape[-1:], dtype=mean.dtype, device=x.device)
    sums = torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], mean, rstd, ones, ones, [False, *needs])
    return tuple(sums[1:])


def _sum_blocks(gradient: Tensor) -> Tensor:
    """``[blocks, hidden]`` from ``[rows, hidden]``."""
    if gradient.ndim == 1 or gradient.shape[0] % _BLOCK:
        return formulas.sum_over_rows(gradient)
    return gradient.reshape(-1, _BLOCK, gradient.shape[1]).sum(1)


def _finished(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or dtype is None:
        return None
    return (gradient.sum(0) if gradient.ndim == 2 else gradient).to(dtype)
