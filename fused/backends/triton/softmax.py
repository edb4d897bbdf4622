"""Scaled, masked softmax in one kernel forward and one backward, reading no block of 16 keys outside a window.

A row of at most `WHOLE` keys is loaded at once. A longer one is read twice: for its maximum and its sum, which
are updated from block to block, and for the probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.reference.numbers import sum_over
from fused.backends.reference.softmax import FAR, Window
from fused.backends.triton.arithmetic import exp, reciprocal
from fused.backends.triton.launch import Constant, Tile, empty_like, launch, row_tile

Tensor = torch.Tensor

WHOLE = 2**14

_NO_MASK, _BOOL, _ADDITIVE, _FILLED = 0, 1, 2, 3
# Adding and subtracting this rounds a float32 to the nearest whole number, ties to even.
_ROUNDER = Constant(1.5 * 2**23)
_FAR = Constant(FAR)


@triton.jit
def _rows(queries, ROWS: tl.constexpr):
    """Return the query block of this program: the number of its [queries, keys] matrix, and the queries [ROWS, 1]."""
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    return program // blocks, (program % blocks * ROWS + tl.arange(0, ROWS))[:, None]


@triton.jit
def _view(query, queries, offset, before, after, keys, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Return first key and end of the keys seen by a query, none for a query after the last."""
    low = tl.maximum(query + offset - before, 0) if BEFORE else query * 0
    high = tl.minimum(tl.maximum(query + offset + after + 1, 0), keys) if AFTER else query * 0 + keys
    return low, tl.where(query < queries, high, 0)


@triton.jit
def _masks(column, low, high, valid, keys, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """Return a mask of the keys seen, and one of the keys to load, the same for every 16 of them."""
    loaded = valid & (column < keys)
    seen = loaded
    if AFTER:
        seen = column < high
        loaded = loaded & (column < (high + 15) // 16 * 16)
    if BEFORE:
        seen = seen & (column >= low)
        loaded = loaded & (column >= low // 16 * 16)
    return seen, loaded


@triton.jit
def _scores(x, mask, mask_stride, scale, fill, column, seen, loaded, MASK: tl.constexpr):
    """Compute scale·x + mask in float32 (−∞ for hidden keys) and a mask of the keys seen."""
    z = tl.load(x + column, mask=loaded, other=0.0).to(tl.float32) * scale
    if MASK == 1:
        seen = seen & (tl.load(mask + column * mask_stride, mask=loaded, other=1) == 0)
    if MASK == 2:
        # Compared as float32 too: Triton 3.9's interpreter compares the bits of bfloat16.
        added = tl.load(mask + column * mask_stride, mask=loaded, other=0.0).to(tl.float32)
        total = z + added
        if x.dtype.element_ty == mask.dtype.element_ty and mask.dtype.element_ty.primitive_bitwidth == 16:
            # As in the formula: a completely hidden row depends on the rounded sums.
            sixteen_bits = mask.dtype.element_ty
            rounded = z.to(sixteen_bits).to(tl.float32) + added
            total = tl.where(added < _FAR, rounded.to(sixteen_bits).to(tl.float32), total)
        z = total
    if MASK == 3:
        z = tl.where(tl.load(mask + column * mask_stride, mask=loaded, other=0) != 0, fill, z)
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
        share = (p - rounded) * reciprocal(rounded + tiny) * steps
        tl.store(lost + offset, ((share + _ROUNDER) - _ROUNDER).to(tl.int8), mask=inside)


@triton.jit
def _masked_softmax(
    x, mask, sink, keep, out, signed, sinks, lost, scale, fill, keep_scale, steps, tiny,
    heads, queries, keys, x_batch, x_head, x_query, mask_batch, mask_head, mask_query, mask_key,
    sink_batch, sink_head, sink_query, offset, before, after,
    MASK: tl.constexpr, SINK: tl.constexpr, DROPOUT: tl.constexpr, LOST: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    matrix, query = _rows(queries, ROWS)
    batch, head = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
    valid, query_64 = query < queries, query.to(tl.int64)
    row = matrix.to(tl.int64) * queries + query
    x += batch * x_batch + head * x_head + query_64 * x_query
    if MASK != 0:
        mask += batch * mask_batch + head * mask_head + query_64 * mask_query
    low, high = _view(query, queries, offset, before, after, keys, BEFORE, AFTER)
    highest = tl.full([ROWS, 1], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    if SINK:
        s = tl.load(sink + batch * sink_batch + head * sink_head + query_64 * sink_query, mask=valid, other=0.0)
        highest, total = s.to(tl.float32), tl.full([ROWS, 1], 1.0, tl.float32)
    columns = tl.arange(0, COLUMNS)[None, :]
    if ONCE:
        seen, loaded = _masks(columns, low, high, valid, keys, BEFORE, AFTER)
        z, seen = _scores(x, mask, mask_key, scale, fill, columns, seen, loaded, MASK)
        base = tl.maximum(highest, tl.max(z, 1)[:, None])
        e = exp(z - base)
        total = total * exp(highest - base) + tl.sum(e, 1)[:, None] if SINK else tl.sum(e, 1)[:, None]
        p = tl.where(seen, e * (1 / total), 0.0)
        inside = valid & (columns < keys)
        _store(p, out, signed, lost, keep, row * keys + columns, inside, keep_scale, steps, tiny, DROPOUT, LOST)
    else:
        for start in range(tl.min(low) // COLUMNS * COLUMNS, tl.max(high), COLUMNS):
            column = start + columns
            seen, loaded = _masks(column, low, high, valid, keys, BEFORE, AFTER)
            z, seen = _scores(x, mask, mask_key, scale, fill, column, seen, loaded, MASK)
            top = tl.maximum(highest, tl.max(z, 1)[:, None])
            # If no key has been seen so far, the sums stay 0.
            base = tl.where(top == float("-inf"), 0.0, top)
            total = total * exp(highest - base) + tl.sum(exp(z - base), 1)[:, None]
            highest = top
        base = tl.where(highest == float("-inf"), 0.0, highest)
        inverse = 1 / total
        for start in range(0, keys, COLUMNS):
            column = start + columns
            seen, loaded = _masks(column, low, high, valid, keys, BEFORE, AFTER)
            z, seen = _scores(x, mask, mask_key, scale, fill, column, seen, loaded, MASK)
            p = tl.where(seen, exp(z - base) * inverse, 0.0)
            inside = valid & (column < keys)
            _store(p, out, signed, lost, keep, row * keys + column, inside, keep_scale, steps, tiny, DROPOUT, LOST)
    if SINK:
        tl.store(sinks + row, exp(s.to(tl.float32) - base) / total, mask=valid)


@triton.jit
def _load_back(
    p, lost, g, offset, seen, loaded, keep_scale, steps, tiny,
    DROPOUT: tl.constexpr, LOST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Load probabilities in float32, and their gradients, with 0 for hidden keys."""
    raw = tl.load(p + offset, mask=loaded, other=0.0)
    dp = tl.load(g + offset, mask=loaded, other=0.0).to(tl.float32)
    value = raw.to(tl.float32)
    if WINDOW:
        # Keys that were only loaded for the width of the load.
        dp, value = tl.where(seen, dp, 0.0), tl.where(seen, value, 0.0)
    if DROPOUT:
        bits: tl.constexpr = tl.int32 if p.dtype.element_ty == tl.float32 else tl.int16
        keeps = raw.to(bits, bitcast=True) >= 0
        dp = dp * keeps.to(tl.float32) * keep_scale
        value = tl.abs(value)
    if LOST:
        error = tl.load(lost + offset, mask=loaded, other=0).to(tl.float32) * (1 / steps)
        if WINDOW:
            error = tl.where(seen, error, 0.0)
        value += (value + tiny) * error
    return value, dp


@triton.jit
def _unfilled(difference, filled, offset, inside, FILLED: tl.constexpr):
    """Return the gradients of the scores, 0 for those that were replaced."""
    if FILLED:
        difference = tl.where(tl.load(filled + offset, mask=inside, other=1) != 0, 0.0, difference)
    return difference


@triton.jit
def _masked_softmax_backward(
    p, sinks, lost, g, filled, dx, dz, dsinks, scale, keep_scale, steps, tiny,
    heads, queries, keys, filled_batch, filled_head, filled_query, filled_key, offset, before, after,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, LOST: tl.constexpr, FILLED: tl.constexpr,
    DX: tl.constexpr, DZ: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    WINDOW: tl.constexpr = BEFORE or AFTER
    matrix, query = _rows(queries, ROWS)
    valid = query < queries
    row = matrix.to(tl.int64) * queries + query
    if FILLED:
        batch, head = (matrix // heads).to(tl.int64), (matrix % heads).to(tl.int64)
        filled += batch * filled_batch + head * filled_head + query.to(tl.int64) * filled_query
    low, high = _view(query, queries, offset, before, after, keys, BEFORE, AFTER)
    columns = tl.arange(0, COLUMNS)[None, :]
    if ONCE:
        here = row * keys + columns
        seen, loaded = _masks(columns, low, high, valid, keys, BEFORE, AFTER)
        value, dp = _load_back(p, lost, g, here, seen, loaded, keep_scale, steps, tiny, DROPOUT, LOST, WINDOW)
        inner = tl.sum(value * dp, 1)[:, None]
        inside = valid & (columns < keys)
        difference = _unfilled(value * (dp - inner), filled, columns * filled_key, inside, FILLED)
        if DX:
            tl.store(dx + here, difference * scale, mask=inside)
        if DZ:
            tl.store(dz + here, difference, mask=inside)
    else:
        inner = tl.zeros([ROWS, 1], tl.float32)
        for start in range(tl.min(low) // COLUMNS * COLUMNS, tl.max(high), COLUMNS):
            column = start + columns
            seen, loaded = _masks(column, low, high, valid, keys, BEFORE, AFTER)
            value, dp = _load_back(
                p, lost, g, row * keys + column, seen, loaded, keep_scale, steps, tiny, DROPOUT, LOST, WINDOW
            )
            inner += tl.sum(value * dp, 1)[:, None]
        for start in range(0, keys, COLUMNS):
            column = start + columns
            seen, loaded = _masks(column, low, high, valid, keys, BEFORE, AFTER)
            value, dp = _load_back(
                p, lost, g, row * keys + column, seen, loaded, keep_scale, steps, tiny, DROPOUT, LOST, WINDOW
            )
            inside = valid & (column < keys)
            difference = _unfilled(value * (dp - inner), filled, column * filled_key, inside, FILLED)
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
    fill: float | None = None,
    rounding: bool = False,
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64 or more than four dimensions."""
    if x.ndim > 4 or torch.float64 in (x.dtype, out_dtype, None if mask is None else mask.dtype):
        return NotImplemented
    whole = x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)
    if whole.stride(3) != 1:
        whole = whole.contiguous()
    batch, heads, queries, keys = whole.shape
    out = empty_like(x, out_dtype)
    signed = None if keep is None else torch.empty_like(out)
    lost = empty_like(x, torch.int8) if rounding else None
    p_sink = None if sink is None else torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    kind = _kind(mask, fill)
    shown = None if mask is None else _broadcast(_bytes(mask), whole.shape)
    kept = None if keep is None else keep.contiguous().view(torch.uint8)
    pulled = None if sink is None else _broadcast(sink, (batch, heads, queries, 1))
    tile, programs = _tile(batch * heads, queries, keys)
    positions, sides = _window(window, shift, queries, keys)
    launch(
        _masked_softmax,
        (programs, 1, 1),
        (whole, shown, pulled, kept, out, signed, p_sink, lost),
        (),
        (
            *(scale, 0.0 if fill is None else fill, keep_scale, *_steps(out_dtype)),
            *(heads, queries, keys, *whole.stride()[:3]),
            *((0, 0, 0, 0) if shown is None else shown.stride()),
            *((0, 0, 0) if pulled is None else pulled.stride()[:3]),
            *positions,
        ),
        MASK=kind,
        SINK=sink is not None,
        DROPOUT=keep is not None,
        LOST=rounding,
        **sides,
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
    filled: Tensor | None,
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
    batch, heads, queries, keys = (*(1,) * (4 - p.ndim), *p.shape)
    shown = None if filled is None else _broadcast(_bytes(filled), (batch, heads, queries, keys))
    dx = None if x_dtype is None else empty_like(p, x_dtype)
    dz = None if mask_sum is None else empty_like(p, torch.float32)
    dsink = None if p_sink is None or sink_sum is None else torch.empty_like(p_sink)
    tile, programs = _tile(batch * heads, queries, keys)
    positions, sides = _window(window, shift, queries, keys)
    launch(
        _masked_softmax_backward,
        (programs, 1, 1),
        (p.contiguous(), p_sink, None if lost is None else lost.contiguous(), g.contiguous(), shown, dx, dz, dsink),
        (),
        (
            *(scale, keep_scale, *_steps(p.dtype), heads, queries, keys),
            *((0, 0, 0, 0) if shown is None else shown.stride()),
            *positions,
        ),
        SINK=dsink is not None,
        DROPOUT=dropout,
        LOST=lost is not None,
        FILLED=filled is not None,
        DX=dx is not None,
        DZ=dz is not None,
        **sides,
        ONCE=tile.columns >= keys,
        **tile.settings,
    )
    dmask = None if dz is None or mask_sum is None else sum_over(dz, mask_sum, keepdim=True)
    return dx, dmask, None if dsink is None or sink_sum is None else sum_over(dsink, sink_sum, keepdim=True)


def _kind(mask: Tensor | None, fill: float | None) -> int:
    if mask is None or mask.dtype != torch.bool:
        return _NO_MASK if mask is None else _ADDITIVE
    return _BOOL if fill is None else _FILLED


def _bytes(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _tile(matrices: int, queries: int, keys: int) -> tuple[Tile, int]:
    """Return the block of a program, of rows of one [queries, keys] matrix, and the number of programs."""
    most = 1 << (queries - 1).bit_length() + (keys - 1).bit_length()
    tile = row_tile(keys, whole=WHOLE, numbers=min(most, 2048))
    return tile, matrices * -(-queries // tile.rows)


def _broadcast(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view in four dimensions, with strides of 0 for broadcast ones."""
    return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape).expand(shape)


def _steps(dtype: torch.dtype) -> tuple[float, float]:
    """Return the steps per unit of the saved rounding error, and the dtype's least normal number."""
    info = torch.finfo(dtype)
    return 254 / info.eps, info.tiny


def _window(window: Window | None, shift: int, queries: int, keys: int) -> tuple[tuple[int, int, int], dict[str, bool]]:
    """Return the key at the position of query 0 and the sides of the window, and which of these are limited."""
    before, after = window or (-1, -1)
    return (keys - queries + shift, before, after), {"BEFORE": before >= 0, "AFTER": after >= 0}
