"""Reference formulas of the scaled, masked softmax with sinks, windows and dropout.

With p the probabilities, the gradient of the scores is p·(g − Σ g·p). A sink is one more column that only
appears in the denominator. Dropout is stored in the sign of the saved probabilities: a negative one was dropped.
The rounding error of 16-bit probabilities is saved in one extra byte, so the gradient is rounded once, as in
eager torch, which saves them a second time in float32.
"""

from __future__ import annotations

import torch

from fused.backends.reference.numbers import compute_dtype, dropped, rounded_to, sum_over
from fused.backends.tracing import is_compiled

Tensor = torch.Tensor
Number = float | Tensor
Window = tuple[int, int]

FAR = -128.0
"""A mask below this value hides its key: bfloat16 numbers below it are 1 or more apart."""


def masked_softmax(
    x: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    keep: Tensor | None,
    scale: Number,
    keep_scale: Number,
    *,
    window: Window | None,
    shift: int,
    out_dtype: torch.dtype,
    fill: float | None = None,
    rounding: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute softmax(scale·x + mask), and the other tensors needed by the backward pass.

    Args:
        x: scores ``[..., queries, keys]``.
        mask: broadcastable to x: bool (True = masked) or floating point (added).
        sink: broadcastable to ``[..., queries, 1]``.
        keep: the shape of x, bool, True for elements kept by dropout, which are multiplied by `keep_scale`.
        window: number of keys before and after a query's position that it sees, −1 for all.
        shift: added to the position of every query, for a shard of the queries.
        fill: what a bool mask replaces the scores by, or None to hide them.
        rounding: whether to return the rounding error of the probabilities in a 16-bit `out_dtype`.

    Returns:
        The result; the signed probabilities with dropout, else None (they are the result); the probabilities of
        the sink ``[..., queries, 1]``, or None; and the rounding error of the probabilities, or None.
    """
    dtype = torch.promote_types(x.dtype, out_dtype)
    if mask is not None and mask.dtype != torch.bool:
        dtype = torch.promote_types(dtype, mask.dtype)
    z = x.to(compute_dtype(dtype))
    if not _is_one(scale):
        z = z * scale
    hidden = None if window is None else out_of_window(x.shape[-2], x.shape[-1], window, shift, x.device)
    by_window = window
    if mask is not None and mask.dtype != torch.bool:
        z = _masked(z, mask, x.dtype if x.dtype == mask.dtype and x.dtype.itemsize < 4 else None)
    elif mask is not None and fill is not None:
        z = z.masked_fill(mask, fill)
    elif mask is not None:
        hidden, by_window = mask if hidden is None else mask | hidden, None
    if hidden is not None:
        z = z.masked_fill(hidden, -torch.inf)
    p, p_sink = _softmax(z, sink)
    if hidden is not None:
        # Rows without a visible key are NaN up to here and become zeros. Compiled code is faster if it finds the rows.
        p = p.masked_fill(_rows_without_keys(hidden, by_window, shift) if is_compiled() else hidden, 0)
    if keep is None:
        out, signed = p.to(out_dtype), None
    else:
        out = dropped(p, keep, keep_scale).to(out_dtype)
        signed = torch.where(keep, p, -p).to(out_dtype)
    return out, signed, p_sink, _lost(p.float(), out_dtype) if rounding else None


def _masked(z: Tensor, mask: Tensor, rounded: torch.dtype | None) -> Tensor:
    """Return z + mask, with the rounding of dtype `rounded` (if given) for mask values below `FAR`.

    Hidden keys have no probability in either case, except in a completely hidden row: there the rounding decides how
    much is left of the scores.
    """
    total = z + mask.to(z.dtype)
    if rounded is None:
        return total
    return torch.where(mask < FAR, (z.to(rounded) + mask).to(z.dtype), total)


def _lost(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of a cast of p to `dtype`, in 127ths of the maximum error, as int8."""
    rounded = rounded_to(p, dtype)
    info = torch.finfo(dtype)
    # Half a unit in the last place is at most eps/2·(p + the least normal number), subnormal p included.
    return ((p - rounded) * (254 / info.eps) / (rounded + info.tiny)).round().to(torch.int8)


def _unrounded(p: Tensor, lost: Tensor, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    return p + (p + info.tiny) * lost * (info.eps / 254)


def _softmax(z: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if sink is None:
        return torch.softmax(z, -1), None
    sink = sink.to(z.dtype)
    if z.shape[-1] == 0:
        return torch.zeros_like(z), torch.ones_like(z.sum(-1, keepdim=True))
    highest = torch.maximum(z.amax(-1, keepdim=True), sink).detach()
    e, e_sink = torch.exp(z - highest), torch.exp(sink - highest)
    total = e.sum(-1, keepdim=True) + e_sink
    return e / total, e_sink / total


def out_of_window(queries: int, keys: int, window: Window, shift: int, device: torch.device) -> Tensor:
    """Return a mask ``[queries, keys]``, True outside of a query's window, the last query aligned to the last key."""
    columns = torch.arange(keys, device=device)
    return _unseen(columns, columns, queries, keys, window, shift, device)


def _rows_without_keys(hidden: Tensor, window: Window | None, shift: int) -> Tensor:
    """Return a mask ``[..., queries, 1]``, True for queries with all keys hidden, by the given window alone if any."""
    if window is None:
        return hidden.all(-1, keepdim=True)
    queries, keys = hidden.shape
    return _unseen(0, keys - 1, queries, keys, window, shift, hidden.device)


def _unseen(
    low: int | Tensor, high: int | Tensor, queries: int, keys: int, window: Window, shift: int, device: torch.device
) -> Tensor:
    """Return a mask ``[queries, ...]``, True if all of the keys from `low` to `high` are outside a query's window."""
    before, after = window
    rows = torch.arange(queries, device=device).unsqueeze(-1) + (keys - queries + shift)
    if before < 0:
        return rows + after < low
    if after < 0:
        return rows - before > high
    return (rows + after < low) | (rows - before > high)


def masked_softmax_backward(
    p: Tensor,
    p_sink: Tensor | None,
    lost: Tensor | None,
    g: Tensor | None,
    g_signed: Tensor | None,
    g_sink: Tensor | None,
    filled: Tensor | None,
    scale: Number,
    keep_scale: Number,
    *,
    dropout: bool,
    x_dtype: torch.dtype | None,
    mask_sum: tuple[int, ...] | None,
    sink_sum: tuple[int, ...] | None,
    window: Window | None = None,
    shift: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x (if `x_dtype` is given), of an additive mask and of the sink.

    Args:
        p: the probabilities, with dropout negative if dropped.
        p_sink: the sink's probabilities.
        lost: the rounding error of p, from the forward formula.
        g, g_signed, g_sink: gradients of the three results; the last two only in double backward.
        filled: the bool mask of the scores that were replaced, if they were.
        mask_sum, sink_sum: the dimensions along which the mask and the sink were broadcast, from the end;
            None if no gradient is needed. Their gradients keep these dimensions and the dtype of the sum.
        window, shift: as in the forward formula, for kernels that skip hidden keys: p is 0 there.
    """
    saved_dtype = p.dtype
    compute = compute_dtype(saved_dtype)
    p = p.to(compute)
    dp = torch.zeros_like(p) if g is None else g.to(compute)
    negative = torch.signbit(p) if dropout else None
    if negative is not None:
        dp = dropped(dp, ~negative, keep_scale)
        p = p.abs()
        if g_signed is not None:
            dp = dp + torch.where(negative, -g_signed, g_signed)
    if lost is not None:
        p = _unrounded(p, lost, saved_dtype)
    if p_sink is None:
        inner = None
        dz = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
    else:
        inner = (dp * p).sum(-1, keepdim=True)
        if g_sink is not None:
            inner = inner + g_sink * p_sink
        dz = p * (dp - inner)
    if filled is not None:
        dz = dz.masked_fill(filled, 0)
    dx = None if x_dtype is None else (dz if _is_one(scale) else dz * scale).to(x_dtype)
    dmask = None if mask_sum is None else sum_over(dz, mask_sum, keepdim=True)
    dsink = None
    if p_sink is not None and inner is not None and sink_sum is not None:
        dsink = sum_over(p_sink * ((0 if g_sink is None else g_sink) - inner), sink_sum, keepdim=True)
    return dx, dmask, dsink


def _is_one(scale: Number) -> bool:
    return isinstance(scale, float) and scale == 1.0
