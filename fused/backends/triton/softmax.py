"""Scaled, masked softmax in one kernel forward and one backward, without reading keys outside a window.

A row of at most `WHOLE` keys is loaded at once. A longer one is read twice: for its maximum and its sum, which
are updated from block to block, and for the probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.reference.softmax import FAR, Window, sum_over
from fused.backends.triton.launch import launch, row_block, row_tile

Tensor = torch.Tensor

WHOLE = 2**14

_NO_MASK, _BOOL, _ADDITIVE = 0, 1, 2
# Adding and subtracting this rounds a float32 to the nearest whole number, ties to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)
_FAR = tl.constexpr(FAR)


@triton.jit
def _position(row, heads, queries):
    """Return batch, head and query of a row."""
    return row // queries // heads, row // queries % heads, row % queries


@triton.jit
def _view(query, offset, before, after, keys):
    """Return first key and end of the keys seen by a query, with a negative side of the window unlimited."""
    low = tl.where(before < 0, 0, query + offset - before)
    high = tl.where(after < 0, keys, query + offset + after + 1)
    return tl.maximum(low, 0), tl.minimum(high, keys)


@triton.jit
def _scores(x, mask, mask_stride, scale, column, seen, MASK: tl.constexpr):
    """Compute scale·x + mask in float32 (−∞ without reading for hidden keys) and a mask of the keys seen."""
    if MASK == 1:
        seen = seen & (tl.load(mask + column * mask_stride, mask=seen, other=1) == 0)
    z = tl.load(x + column, mask=seen, other=0.0).to(tl.float32) * scale
    if MASK == 2:
        added = tl.load(mask + column * mask_stride, mask=seen, other=0.0)
        total = z + added.to(tl.float32)
        if x.dtype.element_ty == mask.dtype.element_ty and mask.dtype.element_ty.primitive_bitwidth == 16:
            # As in the formula: a completely hidden row depends on the rounded sums.
            rounded = z.to(added.dtype).to(tl.float32) + added.to(tl.float32)
            total = tl.where(added < _FAR, rounded.to(added.dtype).to(tl.float32), total)
        z = total
    return tl.where(seen, z, float("-inf")), seen


@triton.jit
def _store(
    p, out, signed, lost, keep, offset, inside, keep_scale, steps, tiny, DROPOUT: tl.constexpr, LOST: tl.constexpr
):  # fmt: skip
    """Store the probabilities p: rounded, with dropout, and their rounding error."""
    if DROPOUT:
        keeps = tl.load(keep + offset, mask=inside, other=0) != 0
        # Multiplied, not negated: 0 − 0 has no sign.
        tl.store(signed + offset, tl.where(keeps, p, p * -1.0), mask=inside)
        tl.store(out + offset, p * keeps.to(tl.float32) * keep_scale, mask=inside)
    else:
        tl.store(out + offset, p, mask=inside)
    if LOST:
        rounded = p.to(out.dtype.element_ty).to(tl.float32)
        share = (p - rounded) * steps / (rounded + tiny)
        tl.store(lost + offset, ((share + _ROUNDER) - _ROUNDER).to(tl.int8), mask=inside)


@triton.jit
def _masked_softmax(
    x, mask, sink, keep, out, signed, sinks, lost, scale, keep_scale, steps, tiny,
    rows, heads, queries, keys, x_batch, x_head, x_query, mask_batch, mask_head, mask_query, mask_key,
    sink_batch, sink_head, sink_query, offset, before, after,
    MASK: tl.constexpr, SINK: tl.constexpr, DROPOUT: tl.constexpr, LOST: tl.constexpr, WINDOW: tl.constexpr,
    ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = row_block(ROWS)
    valid = row < rows
    batch, head, query = _position(row, heads, queries)
    x += batch * x_batch + head * x_head + query * x_query
    if MASK != 0:
        mask += batch * mask_batch + head * mask_head + query * mask_query
    low, high = tl.zeros([ROWS, 1], tl.int64), tl.zeros([ROWS, 1], tl.int64) + keys
    if WINDOW:
        low, high = _view(query, offset, before, after, keys)
    highest = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    if SINK:
        s = tl.load(sink + batch * sink_batch + head * sink_head + query * sink_query, mask=valid, other=0.0)
        highest, total = s.to(tl.float32), tl.full([ROWS, 1], 1.0, tl.float32)
    columns = tl.arange(0, COLUMNS)[None, :]
    if ONCE:
        z, seen = _scores(x, mask, mask_key, scale, columns, valid & (columns >= low) & (columns < high), MASK)
        top = tl.maximum(highest, tl.max(z, 1)[:, None])
        e = tl.exp(z - top)
        total = total * tl.exp(highest - top) + tl.sum(e, 1)[:, None] if SINK else tl.sum(e, 1)[:, None]
        p = tl.where(seen, e / total, 0.0)
        inside = valid & (columns < keys)
        _store(p, out, signed, lost, keep, row * keys + columns, inside, keep_scale, steps, tiny, DROPOUT, LOST)
    else:
        first = tl.min(tl.where(valid, low, keys)) // COLUMNS * COLUMNS
        for start in range(first, tl.max(tl.where(valid, high, 0)), COLUMNS):
            column = start + columns
            z, seen = _scores(x, mask, mask_key, scale, column, valid & (column >= low) & (column < high), MASK)
            top = tl.maximum(highest, tl.max(z, 1)[:, None])
            # If no key has been seen so far, the sums stay 0.
            base = tl.where(top == float("-inf"), 0.0, top)
            total = total * tl.exp(highest - base) + tl.sum(tl.exp(z - base), 1)[:, None]
            highest = top
        top = highest
        base = tl.where(top == float("-inf"), 0.0, top)
        for start in range(0, keys, COLUMNS):
            column = start + columns
            z, seen = _scores(x, mask, mask_key, scale, column, valid & (column >= low) & (column < high), MASK)
            p = tl.where(seen, tl.exp(z - base) / total, 0.0)
            inside = valid & (column < keys)
            _store(p, out, signed, lost, keep, row * keys + column, inside, keep_scale, steps, tiny, DROPOUT, LOST)
    if SINK:
        tl.store(sinks + row, tl.exp(s.to(tl.float32) - top) / total, mask=valid)


@triton.jit
def _load_back(
    p, lost, g, offset, seen, keep_scale, steps, tiny, DROPOUT: tl.constexpr, LOST: tl.constexpr
):  # fmt: skip
    """Load probabilities in float32, and their gradients."""
    raw = tl.load(p + offset, mask=seen, other=0.0)
    dp = tl.load(g + offset, mask=seen, other=0.0).to(tl.float32)
    value = raw.to(tl.float32)
    if DROPOUT:
        bits: tl.constexpr = tl.int32 if p.dtype.element_ty == tl.float32 else tl.int16
        keeps = raw.to(bits, bitcast=True) >= 0
        dp = dp * keeps.to(tl.float32) * keep_scale
        value = tl.abs(value)
    if LOST:
        value += (value + tiny) * tl.load(lost + offset, mask=seen, other=0).to(tl.float32) / steps
    return value, dp


@triton.jit
def _masked_softmax_backward(
    p, sinks, lost, g, dx, dz, dsinks, scale, keep_scale, steps, tiny,
    rows, queries, keys, offset, before, after,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, LOST: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr,
    WINDOW: tl.constexpr, ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = row_block(ROWS)
    valid = row < rows
    low, high = tl.zeros([ROWS, 1], tl.int64), tl.zeros([ROWS, 1], tl.int64) + keys
    if WINDOW:
        low, high = _view(row % queries, offset, before, after, keys)
    columns = tl.arange(0, COLUMNS)[None, :]
    if ONCE:
        seen = valid & (columns >= low) & (columns < high)
        value, dp = _load_back(p, lost, g, row * keys + columns, seen, keep_scale, steps, tiny, DROPOUT, LOST)
        inner = tl.sum(value * dp, 1)[:, None]
        difference = value * (dp - inner)
        inside = valid & (columns < keys)
        if DX:
            tl.store(dx + row * keys + columns, difference * scale, mask=inside)
        if DZ:
            tl.store(dz + row * keys + columns, difference, mask=inside)
    else:
        inner = tl.zeros([ROWS, 1], tl.float32)
        first = tl.min(tl.where(valid, low, keys)) // COLUMNS * COLUMNS
        for start in range(first, tl.max(tl.where(valid, high, 0)), COLUMNS):
            column = start + columns
            seen = valid & (column >= low) & (column < high)
            value, dp = _load_back(p, lost, g, row * keys + column, seen, keep_scale, steps, tiny, DROPOUT, LOST)
            inner += tl.sum(value * dp, 1)[:, None]
        for start in range(0, keys, COLUMNS):
            column = start + columns
            seen = valid & (column >= low) & (column < high)
            value, dp = _load_back(p, lost, g, row * keys + column, seen, keep_scale, steps, tiny, DROPOUT, LOST)
            difference = value * (dp - inner)
            inside = valid & (column < keys)
            if DX:
                tl.store(dx + row * keys + column, difference * scale, mask=inside)
            if DZ:
                tl.store(dz + row * keys + column, difference, mask=inside)
    if SINK:
        share = tl.load(sinks + row, mask=valid, other=0.0).to(tl.float32)
        tl.store(dsinks + row, 0.0 - share * inner, mask=valid)


def masked_softmax(
    x: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    keep: Tensor | None,
    scale: float,
    keep_scale: float,
    *,
    window: Window | None,
    shift: int,
    out_dtype: torch.dtype,
    rounding: bool = False,
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64 or more than four dimensions."""
    if x.ndim > 4 or torch.float64 in (x.dtype, out_dtype, None if mask is None else mask.dtype):
        return NotImplemented
    whole = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if whole.stride(3) != 1:
        whole = whole.contiguous()
    batch, heads, queries, keys = whole.shape
    rows = batch * heads * queries
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    signed = None if keep is None else torch.empty_like(out)
    lost = torch.empty(x.shape, dtype=torch.int8, device=x.device) if rounding else None
    p_sink = None if sink is None else torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    kind = _NO_MASK if mask is None else _BOOL if mask.dtype == torch.bool else _ADDITIVE
    shown = None if mask is None else _broadcast(mask.view(torch.uint8) if kind == _BOOL else mask, whole.shape)
    pulled = None if sink is None else _broadcast(sink, (batch, heads, queries, 1))
    tile = row_tile(keys, whole=WHOLE)
    launch(
        _masked_softmax,
        (triton.cdiv(rows, tile.rows),),
        *(whole, shown, pulled, None if keep is None else keep.contiguous().view(torch.uint8)),
        *(out, signed, p_sink, lost, scale, keep_scale, *_steps(out_dtype)),
        *(rows, heads, queries, keys, *whole.stride()[:3]),
        *((0, 0, 0, 0) if shown is None else shown.stride()),
        *((0, 0, 0) if pulled is None else pulled.stride()[:3]),
        *_window(window, shift, queries, keys),
        MASK=kind,
        SINK=sink is not None,
        DROPOUT=keep is not None,
        LOST=rounding,
        WINDOW=window is not None,
        ONCE=tile.columns >= keys,
        **tile.settings,
    )
    return out, signed, p_sink, lost


def masked_softmax_backward(
    p: Tensor,
    p_sink: Tensor | None,
    lost: Tensor | None,
    g: Tensor | None,
    g_signed: Tensor | None,
    g_sink: Tensor | None,
    scale: float,
    keep_scale: float,
    *,
    dropout: bool,
    x_dtype: torch.dtype | None,
    mask_sum: tuple[int, ...] | None,
    sink_sum: tuple[int, ...] | None,
    window: Window | None,
    shift: int,
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64 or in double backward."""
    if g is None or g_signed is not None or g_sink is not None or torch.float64 in (p.dtype, g.dtype, x_dtype):
        return NotImplemented
    keys, queries = p.shape[-1], p.shape[-2] if p.ndim > 1 else 1
    rows = p.numel() // keys
    dx = None if x_dtype is None else torch.empty(p.shape, dtype=x_dtype, device=p.device)
    dz = None if mask_sum is None else torch.empty(p.shape, dtype=torch.float32, device=p.device)
    dsink = None if p_sink is None or sink_sum is None else torch.empty_like(p_sink)
    tile = row_tile(keys, whole=WHOLE)
    launch(
        _masked_softmax_backward,
        (triton.cdiv(rows, tile.rows),),
        *(p.contiguous(), p_sink, None if lost is None else lost.contiguous(), g.contiguous(), dx, dz, dsink),
        *(scale, keep_scale, *_steps(p.dtype), rows, queries, keys, *_window(window, shift, queries, keys)),
        SINK=dsink is not None,
        DROPOUT=dropout,
        LOST=lost is not None,
        DX=dx is not None,
        DZ=dz is not None,
        WINDOW=window is not None,
        ONCE=tile.columns >= keys,
        **tile.settings,
    )
    dmask = None if dz is None or mask_sum is None else sum_over(dz, mask_sum)
    return dx, dmask, None if dsink is None or sink_sum is None else sum_over(dsink, sink_sum)


def _broadcast(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view in four dimensions, with strides of 0 for broadcast ones."""
    return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape).expand(shape)


def _steps(dtype: torch.dtype) -> tuple[float, float]:
    """Return the steps per unit of the saved rounding error, and the dtype's least normal number."""
    info = torch.finfo(dtype)
    return 254 / info.eps, info.tiny


def _window(window: Window | None, shift: int, queries: int, keys: int) -> tuple[int, int, int]:
    """Return the key at the position of query 0, and the sides of the window."""
    return keys - queries + shift, *(window or (-1, -1))
