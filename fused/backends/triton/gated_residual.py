"""Gated residual sums in one kernel forward and one backward, with the sum of the gate's gradient.

The values are rows. A gate that varies along them has one row for each sample, of `per` rows; any other has one number
for each row, the same for rows that are `per` apart.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.rows import merged_shapes
from fused.backends.triton.launch import (
    any_float64,
    as_rows,
    cdiv,
    column_block,
    column_tile,
    empty_like,
    launch,
    processors,
    row_block,
    row_tile,
)

Tensor = torch.Tensor


@triton.jit
def _factor(gate, row, column, inside, per, columns, ALONG: tl.constexpr):
    at = row // per * columns + column if ALONG else row % per
    return tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "per"])
def _forward(
    residual, value, gate, out, rows, per, columns, residual_stride, value_stride,
    ALONG: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = row_block(ROWS), column_block(COLUMNS)
    inside = (row < rows) & (column < columns)
    total = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    numbers = tl.load(value + row * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    total += numbers * _factor(gate, row, column, inside, per, columns, ALONG)
    tl.store(out + row * columns + column, total, mask=inside)


@triton.jit(do_not_specialize=["per", "parts"])
def _backward_along(
    g, value, gate, of_value, partials, per, parts, columns, g_stride, value_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, program = column_block(COLUMNS), tl.program_id(0).to(tl.int64)
    sample, span = program // parts, tl.cdiv(tl.cdiv(per, ROWS), parts) * ROWS
    first = program % parts * span
    end = tl.minimum(first + span, per)
    factor = tl.load(gate + sample * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, end, ROWS):
        within = (start + tl.arange(0, ROWS))[:, None]
        row, inside = sample * per + within, (within < end) & (column < columns)
        incoming = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
        if of_value is not None:
            tl.store(of_value + row * columns + column, incoming * factor, mask=inside)
        if partials is not None:
            total += incoming * tl.load(value + row * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    if partials is not None:
        tl.store(partials + program * columns + column, tl.sum(total, 0)[None, :], mask=column < columns)


@triton.jit(do_not_specialize=["rows", "per"])
def _backward_across(
    g, value, gate, of_value, sums, rows, per, columns, g_stride, value_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = row_block(ROWS)
    factor = tl.load(gate + row % per, mask=row < rows, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (row < rows) & (column < columns)
        incoming = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
        if of_value is not None:
            tl.store(of_value + row * columns + column, incoming * factor, mask=inside)
        if sums is not None:
            total += incoming * tl.load(value + row * value_stride + column, mask=inside, other=0.0).to(tl.float32)
    if sums is not None:
        tl.store(sums + row, tl.sum(total, 1)[:, None], mask=row < rows)


def _layout(shape: torch.Size, gate: torch.Size) -> tuple[int, int, int, bool] | None:
    """Return samples, rows of each, columns, and whether the gate varies along the columns; or None for other gates."""
    sizes, of_gate = merged_shapes(shape, gate)
    if len(sizes) > 3:
        return None
    samples, per, columns = (1,) * (3 - len(sizes)) + tuple(sizes)
    return samples, per, columns, of_gate[-1] != 1


def gated_residual(residual: Tensor, value: Tensor, gate: Tensor) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64 and rare shapes of the gate."""
    layout = _layout(value.shape, gate.shape)
    if layout is None or any_float64(residual, value, gate):
        return NotImplemented
    samples, per, columns, along = layout
    rows = samples * per
    dtype = torch.promote_types(torch.result_type(value, gate), residual.dtype)
    residuals, values = (as_rows(one.reshape(rows, columns)) for one in (residual, value))
    out, tile = empty_like(value, dtype), column_tile(columns)
    launch(
        _forward,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns), 1),
        (residuals, values, gate.contiguous(), out),
        (rows, per),
        (columns, residuals.stride(0), values.stride(0)),
        ALONG=along,
        **tile.settings,
    )
    return out


def gated_residual_backward(g: Tensor, value: Tensor | None, gate: Tensor, *, value_dtype: torch.dtype | None) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64 and rare shapes of the gate."""
    layout = _layout(g.shape, gate.shape)
    if layout is None or any_float64(g, value, gate):
        return NotImplemented
    samples, per, columns, along = layout
    rows = samples * per
    incoming = as_rows(g.reshape(rows, columns))
    values = None if value is None else as_rows(value.reshape(rows, columns))
    of_value = None if value_dtype is None else empty_like(g, value_dtype)
    tensors = (incoming, values, gate.contiguous(), of_value)
    numbers = (columns, incoming.stride(0), 0 if values is None else values.stride(0))
    if along:
        tile = column_tile(columns)
        blocks = cdiv(columns, tile.columns)
        parts = min(cdiv(per, tile.rows), max(processors(g.device) * 12 // (blocks * samples), 1))
        sums = None if value is None else g.new_empty((samples, parts, columns), dtype=torch.float32)
        grid = (samples * parts, blocks, 1)
        launch(_backward_along, grid, (*tensors, sums), (per, parts), numbers, **tile.settings)
    else:
        tile = row_tile(columns, whole=4096)
        sums = None if value is None else g.new_empty((samples, per), dtype=torch.float32)
        grid = (cdiv(rows, tile.rows), 1, 1)
        launch(_backward_across, grid, (*tensors, sums), (rows, per), numbers, **tile.settings)
    of_gate = None if sums is None else sums.sum(1 if along else 0).to(gate.dtype).view(gate.shape)
    return of_value, of_gate
