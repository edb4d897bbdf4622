"""Bias + dropout (+ residual) in one kernel forward and one backward, with the sum of the bias gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.triton.launch import (
    as_rows,
    cdiv,
    column_block,
    column_partials,
    column_tile,
    compute_type,
    empty_like,
    launch,
    row_block,
    row_span,
    rows_with_stride,
)
from fused.philox import DropoutStream

Tensor = torch.Tensor
Keep = Tensor | DropoutStream


@triton.jit
def _kept(
    keep, row, column, inside, keep_stride, columns, seed, first, threads, threshold,
    VECTOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load the keep mask, or with VECTOR > 0 draw it as torch's dropout does on a GPU."""
    if VECTOR == 0:
        return tl.load(keep + row * keep_stride + column, mask=inside, other=0) != 0
    else:
        # Four consecutive elements have the four numbers of one counter.
        quads = tl.program_id(1) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :]
        quad = (row * (columns // 4) + quads).to(tl.uint32)
        each: tl.constexpr = VECTOR // 4
        chunk = quad // each
        threads = threads.to(tl.uint32)
        counter = first + (chunk // threads * each + quad % each).to(tl.int64)
        low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
        a, b, c, d = tl.philox(seed, low, high, chunk % threads, quad * 0)
        limit = threshold.to(tl.uint32)
        numbers = tl.join(tl.join(a, c), tl.join(b, d))
        return tl.reshape(numbers, [row.shape[0], COLUMNS]) < limit


@triton.jit(do_not_specialize=["seed", "first", "threshold", "rows"])
def _forward(
    x, bias, residual, keep, out, seed, first, threshold, rows,
    columns, x_stride, residual_stride, keep_stride, threads, keep_scale,
    COMPUTE: tl.constexpr, DROPOUT: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = row_block(ROWS), column_block(COLUMNS)
    inside = (row < rows) & (column < columns)
    z = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(COMPUTE)
    if bias is not None:
        z += tl.load(bias + column, mask=column < columns, other=0.0).to(COMPUTE)
    if DROPOUT:
        keeps = _kept(keep, row, column, inside, keep_stride, columns, seed, first, threads, threshold, VECTOR, COLUMNS)
        # Multiplied, not selected: a dropped NaN stays one.
        z = z * tl.where(keeps, keep_scale, 0.0)
    if residual is not None:
        z += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(COMPUTE)
    tl.store(out + row * columns + column, z, mask=inside)


@triton.jit(do_not_specialize=["seed", "first", "threshold", "rows"])
def _backward(
    g, keep, dx, partials, seed, first, threshold, rows, columns, g_stride, keep_stride, threads, keep_scale,
    COMPUTE: tl.constexpr, DROPOUT: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start, end = row_span(rows, ROWS)
    column = column_block(COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], COMPUTE)
    for begin in range(start, end, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        inside = (row < end) & (column < columns)
        dz = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(COMPUTE)
        if DROPOUT:
            keeps = _kept(
                keep, row, column, inside, keep_stride, columns, seed, first, threads, threshold, VECTOR, COLUMNS
            )
            dz = dz * tl.where(keeps, keep_scale, 0.0)
        if dx is not None:
            tl.store(dx + row * columns + column, dz, mask=inside)
        if partials is not None:
            total += dz
    if partials is not None:
        target = partials + tl.program_id(0).to(tl.int64) * columns + column
        tl.store(target, tl.sum(total, 0, keep_dims=True), mask=column < columns)


def bias_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keep: Keep | None, keep_scale: float
) -> Tensor:
    """Compute the reference formula of this name, or return NotImplemented for dropout in float64.

    The kernel would get the dropout scale in float32. With a stream instead of a mask, x has a number of columns
    divisible by 8.
    """
    compute = compute_type(x, bias, residual)
    if keep is not None and compute == tl.float64:
        return NotImplemented
    dtype = x.dtype
    for other in (bias, residual):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    flat = as_rows(x)
    residual_rows, residual_stride = rows_with_stride(residual)
    mask, mask_stride, threads, drawn, dropout = _dropout(keep)
    rows, columns = flat.shape
    tile = column_tile(columns)
    out = empty_like(x, dtype)
    launch(
        _forward,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns), 1),
        (flat, None if bias is None else bias.contiguous(), residual_rows, mask, out),
        (*drawn, rows),
        (columns, flat.stride(0), residual_stride, mask_stride, threads, keep_scale),
        COMPUTE=compute,
        **dropout,
        **tile.settings,
    )
    return out


def bias_dropout_backward(
    g: Tensor,
    keep: Keep | None,
    keep_scale: float,
    *,
    x_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the reference formula of this name, or return NotImplemented for dropout in float64."""
    compute = compute_type(g)
    if keep is not None and compute == tl.float64:
        return NotImplemented
    flat, (mask, mask_stride, threads, drawn, dropout) = as_rows(g), _dropout(keep)
    rows, columns = flat.shape
    tile = column_tile(columns)
    partials, programs = None, cdiv(rows, tile.rows)
    if bias_dtype is not None:
        total = torch.float64 if compute == tl.float64 else torch.float32
        partials = column_partials(rows, columns, g.device, total, tile.rows)
        programs = len(partials)
    dx = None if x_dtype is None else empty_like(g, x_dtype)
    launch(
        _backward,
        (programs, cdiv(columns, tile.columns), 1),
        (flat, mask, dx, partials),
        (*drawn, rows),
        (columns, flat.stride(0), mask_stride, threads, keep_scale),
        COMPUTE=compute,
        **dropout,
        **tile.settings,
    )
    dbias = None if partials is None or bias_dtype is None else partials.sum(0).to(bias_dtype)
    return dx, dbias


def _dropout(keep: Keep | None) -> tuple[Tensor | None, int, int, tuple[int, int, int], dict[str, Any]]:
    """Return mask and its row stride, the threads and the numbers of the stream, and the settings of a kernel."""
    if not isinstance(keep, DropoutStream):
        return *rows_with_stride(keep), 0, (0, 0, 0), {"DROPOUT": keep is not None, "VECTOR": 0}
    seed = keep.seed - 2**64 if keep.seed >= 2**63 else keep.seed
    return None, 0, keep.threads, (seed, keep.first, keep.threshold), {"DROPOUT": True, "VECTOR": keep.vector}
