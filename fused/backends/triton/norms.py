"""RMS and layer norms with a residual sum in one kernel forward and one backward, with sums of weight gradients.

A row of at most `WHOLE` columns is loaded at once, in the backward pass while the one before is computed. A longer one
is read twice, and its part of the sums over rows is accumulated in memory that no other program accesses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import triton
import triton.language as tl

from fused.backends.reference.norms import Casting
from fused.backends.triton.arithmetic import add_pairs
from fused.backends.triton.launch import (
    Tile,
    any_float64,
    as_rows,
    cdiv,
    empty_like,
    launch,
    processors,
    row_block,
    row_span,
    row_tile,
    rows_with_stride,
)

Tensor = torch.Tensor

WHOLE = 2**14
# For longer rows: this many rows share one access to the sums in memory.
_LONG = Tile(rows=4, columns=2**11, warps=16)


@triton.jit
def _load_sum(x, residual, total, x_row, residual_row, column, inside):
    """Load x + residual in float32, rounded to the dtype of the sum."""
    z = tl.load(x + x_row + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        z += tl.load(residual + residual_row + column, mask=inside, other=0.0).to(tl.float32)
        z = z.to(total.dtype.element_ty).to(tl.float32)
    return z


@triton.jit
def _moments(z, inside, count, CENTERED: tl.constexpr):
    """Compute the mean of the rows (0 if not centered) and the sum of squares of the deviations."""
    if CENTERED:
        # Division and a sum of large numbers are off by more than the deviations of some rows: their own mean corrects.
        first = tl.sum(z, 1)[:, None] / count
        z = tl.where(inside, z - first, 0.0)
        rest, squares = tl.reduce((z, z * z), 1, add_pairs)
        rest = rest[:, None] / count
        return first + rest, squares[:, None] - rest * rest * count
    return tl.zeros([z.shape[0], 1], tl.float32), tl.sum(z * z, 1)[:, None]


@triton.jit
def _factor(weight, column, columns, ONE_MORE: tl.constexpr):
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    return 1 + scale if ONE_MORE else scale


@triton.jit
def _store_norm(
    normed, z, weight, bias, out, total, offset, column, columns, inside,
    SUM: tl.constexpr, ROUND: tl.constexpr, ONE_MORE: tl.constexpr,
):  # fmt: skip
    """Scale and shift the normalized rows, and write them and the sum."""
    if ROUND:
        normed = normed.to(total.dtype.element_ty).to(tl.float32)
    if weight is not None:
        normed = normed * _factor(weight, column, columns, ONE_MORE)
    if bias is not None:
        normed += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + offset + column, normed, mask=inside)
    if SUM:
        tl.store(total + offset + column, z, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, residual, weight, bias, out, total, means, rstds, rows, x_stride, residual_stride, columns, eps,
    ROUND: tl.constexpr, ONE_MORE: tl.constexpr, CENTERED: tl.constexpr, ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    SUM: tl.constexpr = residual is not None
    row = row_block(ROWS)
    x_row, residual_row, offset = row * x_stride, row * residual_stride, row * columns
    first = tl.arange(0, COLUMNS)[None, :]
    if ONCE:
        inside = (row < rows) & (first < columns)
        z = _load_sum(x, residual, total, x_row, residual_row, first, inside)
        mean, squares = _moments(z, inside, columns, CENTERED)
        rstd = tl.rsqrt(squares / columns + eps)
        normed = (z - mean) * rstd
        _store_norm(normed, z, weight, bias, out, total, offset, first, columns, inside, SUM, ROUND, ONE_MORE)
    else:
        mean = tl.zeros([ROWS, 1], tl.float32)
        squares = tl.zeros([ROWS, 1], tl.float32)
        for start in range(0, columns, COLUMNS):
            inside = (row < rows) & (start + first < columns)
            z = _load_sum(x, residual, total, x_row, residual_row, start + first, inside)
            count = tl.minimum(columns - start, COLUMNS)
            here, more = _moments(z, inside, count, CENTERED)
            squares += more
            if CENTERED:
                # Chan's formula combines the moments of two parts.
                share = count / (start + count)
                squares += (here - mean) * (here - mean) * start * share
                mean += (here - mean) * share
        rstd = tl.rsqrt(squares / columns + eps)
        for start in range(0, columns, COLUMNS):
            column = start + first
            inside = (row < rows) & (column < columns)
            z = _load_sum(x, residual, total, x_row, residual_row, column, inside)
            normed = (z - mean) * rstd
            _store_norm(normed, z, weight, bias, out, total, offset, column, columns, inside, SUM, ROUND, ONE_MORE)
    tl.store(rstds + row, rstd, mask=row < rows)
    if CENTERED:
        tl.store(means + row, mean, mask=row < rows)


@triton.jit
def _load_back(g, x, weight, g_row, offset, mean, rstd, column, columns, inside, ONE_MORE: tl.constexpr):
    """Load g, and compute g·weight and the normalized rows."""
    dy = tl.load(g + g_row + column, mask=inside, other=0.0).to(tl.float32)
    normed = (tl.load(x + offset + column, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
    h = dy if weight is None else dy * _factor(weight, column, columns, ONE_MORE)
    return dy, h, normed


@triton.jit
def _store_dx(dx, g_total, h, normed, rstd, inner, center, g_total_row, offset, column, inside):
    d = rstd * (h - center - normed * inner)
    if g_total is not None:
        d += tl.load(g_total + g_total_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + offset + column, d, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(
    g, g_total, x, weight, means, rstds, dx, sums, rows, columns, g_stride, g_total_stride, x_stride,
    ONE_MORE: tl.constexpr, CENTERED: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    begin, end = row_span(rows, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    if weight is not None:
        factor = _factor(weight, column, columns, ONE_MORE)
    # The next rows are read while these are computed.
    for block in tl.range(begin, end, ROWS, num_stages=2):
        row = (block + tl.arange(0, ROWS))[:, None]
        valid = row < end
        inside = valid & (column < columns)
        dy = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=valid, other=0.0)
        mean = tl.load(means + row, mask=valid, other=0.0) if CENTERED else 0.0
        normed = (z - mean) * rstd
        h = dy if weight is None else dy * factor
        if dx is not None:
            if CENTERED:
                inner, center = tl.reduce((h * normed, h), 1, add_pairs)
                center = center[:, None] / columns
            else:
                inner, center = tl.sum(h * normed, 1), 0.0
            inner = inner[:, None] / columns
            _store_dx(dx, g_total, h, normed, rstd, inner, center, row * g_total_stride, row * columns, column, inside)
        if DWEIGHT:
            dweight += dy * normed
        if DBIAS:
            dbias += dy
    sums += tl.program_id(0).to(tl.int64) * ((DWEIGHT + DBIAS) * columns)
    if DWEIGHT:
        tl.store(sums + column, tl.sum(dweight, 0, keep_dims=True), mask=column < columns)
    if DBIAS:
        tl.store(sums + DWEIGHT * columns + column, tl.sum(dbias, 0, keep_dims=True), mask=column < columns)


@triton.jit(do_not_specialize=["rows"])
def _long_norm_backward(
    g, g_total, x, weight, means, rstds, dx, sums, rows, columns, g_stride, g_total_stride, x_stride,
    ONE_MORE: tl.constexpr, CENTERED: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute `_norm_backward` of longer rows, with the sums accumulated in memory."""
    begin, end = row_span(rows, ROWS)
    first = tl.arange(0, COLUMNS)[None, :]
    sums += tl.program_id(0).to(tl.int64) * ((DWEIGHT + DBIAS) * columns)
    for block in range(begin, end, ROWS):
        row = (block + tl.arange(0, ROWS))[:, None]
        valid = row < end
        rstd = tl.load(rstds + row, mask=valid, other=0.0)
        mean = tl.load(means + row, mask=valid, other=0.0) if CENTERED else tl.zeros([ROWS, 1], tl.float32)
        g_row, g_total_row, x_row, offset = row * g_stride, row * g_total_stride, row * x_stride, row * columns
        inner = tl.zeros([ROWS, 1], tl.float32)
        center = tl.zeros([ROWS, 1], tl.float32)
        if dx is not None:
            for start in range(0, columns, COLUMNS):
                column = start + first
                inside = valid & (column < columns)
                dy, h, normed = _load_back(g, x, weight, g_row, x_row, mean, rstd, column, columns, inside, ONE_MORE)
                inner += tl.sum(h * normed, 1)[:, None]
                if CENTERED:
                    center += tl.sum(h, 1)[:, None]
            inner /= columns
            center /= columns
        for start in range(0, columns, COLUMNS):
            column = start + first
            inside = valid & (column < columns)
            dy, h, normed = _load_back(g, x, weight, g_row, x_row, mean, rstd, column, columns, inside, ONE_MORE)
            if dx is not None:
                _store_dx(dx, g_total, h, normed, rstd, inner, center, g_total_row, offset, column, inside)
            if DWEIGHT:
                _add_to(sums, tl.sum(dy * normed, 0, keep_dims=True), column, columns)
            if DBIAS:
                _add_to(sums + DWEIGHT * columns, tl.sum(dy, 0, keep_dims=True), column, columns)
        # In the next iteration a thread may read sums written by another.
        tl.debug_barrier()


@triton.jit
def _add_to(sums, amount, column, columns):
    before = tl.load(sums + column, mask=column < columns, other=0.0)
    tl.store(sums + column, before + amount, mask=column < columns)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, *, eps: float, casting: Casting
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    dtype = _sum_dtype(x, residual)
    llama = casting == "llama" and weight is not None
    out_dtype = torch.promote_types(dtype, weight.dtype) if llama and weight is not None else dtype
    if any_float64(x, residual, weight):
        return NotImplemented
    out, total, _, rstd = _forward(
        x, residual, weight, None, eps, out_dtype, round_first=llama, one_more=casting == "gemma", centered=False
    )
    return out, total, rstd


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if any_float64(x, residual, weight, bias):
        return NotImplemented
    results = _forward(x, residual, weight, bias, eps, out_dtype, round_first=False, one_more=False, centered=True)
    return cast("tuple[Tensor, Tensor | None, Tensor, Tensor]", results)


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
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if any_float64(g, g_total, x, weight):
        return NotImplemented
    weight_dtype = weight.dtype if weight is not None and needs[1] else None
    dtypes = x.dtype if needs[0] else None, weight_dtype, None
    return _backward(g, g_total, x, weight, None, rstd, dtypes, one_more=casting == "gemma")[:2]


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
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if any_float64(g, g_total, x, weight):
        return NotImplemented
    weight_dtype = weight.dtype if weight is not None and needs[1] else None
    return _backward(g, g_total, x, weight, mean, rstd, (x.dtype if needs[0] else None, weight_dtype, bias_dtype))


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    *,
    round_first: bool,
    one_more: bool,
    centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Compute the norm, the sum, means and reciprocal deviations."""
    flat = as_rows(x)
    rows, columns = flat.shape
    tile = _tile(columns)
    out = empty_like(x, out_dtype)
    residual_rows, residual_stride = rows_with_stride(residual)
    total = None if residual is None else empty_like(x, _sum_dtype(x, residual))
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    mean = torch.empty_like(rstd) if centered else None
    launch(
        _norm,
        (cdiv(rows, tile.rows), 1, 1),
        (flat, residual_rows, _vector(weight), _vector(bias), out, x if total is None else total, mean, rstd),
        (rows,),
        (flat.stride(0), residual_stride, columns, float(eps)),
        ROUND=round_first,
        ONE_MORE=one_more,
        CENTERED=centered,
        ONCE=tile.columns >= columns,
        **tile.settings,
    )
    return out, total, mean, rstd


def _backward(
    g: Tensor,
    g_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dtypes: tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None],
    *,
    one_more: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias in these dtypes, skipping those of None."""
    flat, x_rows = as_rows(g), as_rows(x)
    total_rows, total_stride = rows_with_stride(g_total)
    rows, columns = flat.shape
    tile = _tile(columns)
    once = tile.columns >= columns
    programs = _programs(rows, tile, x.device)
    dx = None if dtypes[0] is None else empty_like(x, dtypes[0])
    wanted = [dtype for dtype in dtypes[1:] if dtype is not None]
    of_all = once and programs == 1 and len(set(wanted)) == 1  # the only program writes the sums as they are returned
    # Sums of long rows are accumulated in memory.
    make, dtype = torch.empty if once else torch.zeros, wanted[0] if of_all else torch.float32
    sums = make(programs, len(wanted), columns, dtype=dtype, device=x.device)
    launch(
        _norm_backward if once else _long_norm_backward,
        (programs, 1, 1),
        (flat, total_rows, x_rows, _vector(weight), _vector(mean), rstd.contiguous(), dx, sums),
        (rows,),
        (columns, flat.stride(0), total_stride, x_rows.stride(0)),
        ONE_MORE=one_more,
        CENTERED=mean is not None,
        DWEIGHT=dtypes[1] is not None,
        DBIAS=dtypes[2] is not None,
        **tile.settings,
    )
    if not wanted:
        return dx, None, None
    totals = (sums.view(-1, columns) if of_all else sums.sum(0)).unbind()
    found = [total.to(kind) for total, kind in zip(totals, wanted, strict=True)]
    return dx, found.pop(0) if dtypes[1] is not None else None, found[0] if found else None


def _tile(columns: int) -> Tile:
    if columns > WHOLE:
        return _LONG
    tile = row_tile(columns, whole=WHOLE)
    # Sixteen numbers a thread: the sums of the gradients are in registers.
    return replace(tile, warps=2 * tile.warps) if tile.columns == WHOLE else tile


def _programs(rows: int, tile: Tile, device: torch.device) -> int:
    """Return the number of programs for the rows, fewer for large blocks with their longer rows of sums."""
    return min(cdiv(rows, tile.rows), processors(device) * max(2**13 // (tile.rows * tile.columns), 1))


def _sum_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _vector(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
