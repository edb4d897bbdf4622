"""Bias + dropout (+ residual) in one kernel forward and one backward, with the sum of the bias gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused.backends.triton.launch import (
    as_rows,
    column_block,
    column_partials,
    column_tile,
    compute_type,
    launch,
    row_block,
    row_span,
    rows_with_stride,
    warps_tuned,
)

Tensor = torch.Tensor


@warps_tuned
@triton.jit
def _forward(
    x, bias, residual, keep, out, keep_scale, rows, columns, x_stride, residual_stride, keep_stride,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = row_block(ROWS), column_block(COLUMNS)
    inside = (row < rows) & (column < columns)
    z = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(COMPUTE)
    if bias is not None:
        z += tl.load(bias + column, mask=column < columns, other=0.0).to(COMPUTE)
    if keep is not None:
        # Multiplied, not selected: a dropped NaN stays one.
        keeps = tl.load(keep + row * keep_stride + column, mask=inside, other=0)
        z = z * keeps.to(COMPUTE) * keep_scale
    if residual is not None:
        z += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(COMPUTE)
    tl.store(out + row * columns + column, z, mask=inside)


@triton.jit
def _backward(
    g, keep, dx, partials, keep_scale, rows, columns, g_stride, keep_stride,
    COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start, end = row_span(rows, ROWS)
    column = column_block(COLUMNS)
    total = tl.zeros([1, COLUMNS], COMPUTE)
    for first in range(start, end, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        inside = (row < end) & (column < columns)
        dz = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(COMPUTE)
        if keep is not None:
            keeps = tl.load(keep + row * keep_stride + column, mask=inside, other=0)
            dz = dz * keeps.to(COMPUTE) * keep_scale
        if dx is not None:
            tl.store(dx + row * columns + column, dz, mask=inside)
        if partials is not None:
            total += tl.sum(dz, 0, keep_dims=True)
    if partials is not None:
        tl.store(partials + tl.program_id(0) * columns + column, total, mask=column < columns)


def bias_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, keep: Tensor | None, keep_scale: float
) -> Tensor:
    """Compute the reference formula of this name, or return NotImplemented for dropout in float64.

    The kernel would get the dropout scale in float32.
    """
    compute = compute_type(x, bias, residual)
    if keep is not None and compute == tl.float64:
        return NotImplemented
    dtype = x.dtype
    for other in (bias, residual):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    flat = as_rows(x)
    (residual_rows, residual_stride), (keep_rows, keep_stride) = rows_with_stride(residual), rows_with_stride(keep)
    rows, columns = flat.shape
    tile = column_tile(columns)
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    launch(
        _forward,
        (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns)),
        *(flat, None if bias is None else bias.contiguous(), residual_rows, keep_rows, out),
        *(keep_scale, rows, columns, flat.stride(0), residual_stride, keep_stride),
        COMPUTE=compute,
        **tile.block,
    )
    return out.view(x.shape)


def bias_dropout_backward(
    g: Tensor,
    keep: Tensor | None,
    keep_scale: float,
    *,
    x_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the reference formula of this name, or return NotImplemented for dropout in float64."""
    compute = compute_type(g)
    if keep is not None and compute == tl.float64:
        return NotImplemented
    flat, (keep_rows, keep_stride) = as_rows(g), rows_with_stride(keep)
    rows, columns = flat.shape
    tile = column_tile(columns)
    total = torch.float64 if compute == tl.float64 else torch.float32
    partials = column_partials(rows, columns, g.device, total, tile.rows)
    dx = None if x_dtype is None else torch.empty(rows, columns, dtype=x_dtype, device=g.device)
    launch(
        _backward,
        (len(partials), triton.cdiv(columns, tile.columns)),
        *(flat, keep_rows, dx, None if bias_dtype is None else partials),
        *(keep_scale, rows, columns, flat.stride(0), keep_stride),
        COMPUTE=compute,
        **tile.settings,
    )
    dbias = None if bias_dtype is None else partials.sum(0).to(bias_dtype)
    return None if dx is None else dx.view(g.shape), dbias
