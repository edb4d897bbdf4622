"""Gated activations in one kernel forward and one backward, with the sums for the bias and the weights."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.reference.gated import PASSES_AT_LIMIT
from fused.backends.triton.activations import activate, slope
from fused.backends.triton.launch import (
    Constant,
    any_float64,
    as_rows,
    cdiv,
    column_block,
    column_partials,
    column_tile,
    empty_like,
    launch,
    row_block,
    row_span,
)

Tensor = torch.Tensor

_PASSES_AT_LIMIT = Constant(PASSES_AT_LIMIT)


@triton.jit
def _limited(gate, linear, offset, clamp):
    # Comparisons, so a NaN stays NaN.
    if clamp is not None:
        gate = tl.where(gate > clamp, clamp, gate)
        linear = tl.where(linear > clamp, clamp, tl.where(linear < -clamp, -clamp, linear))
    if offset is not None:
        linear += offset
    return gate, linear


@triton.jit(do_not_specialize=["rows"])
def _gated(
    gate, up, bias, weights, out, rows, columns, gate_stride, up_stride, offset, clamp,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = row_block(ROWS), column_block(COLUMNS)
    inside = (row < rows) & (column < columns)
    z = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    linear = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        linear += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
    z, linear = _limited(z, linear, offset, clamp)
    value = activate(z, ACTIVATION) * linear
    if weights is not None:
        value *= tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, value, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_backward(
    g, gate, up, bias, weights, dgate, dup, bias_sums, weight_sums, rows, columns,
    g_stride, gate_stride, up_stride, dgate_stride, dup_stride, offset, clamp,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = column_block(COLUMNS)
    if bias is not None:
        gate_bias = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        up_bias = tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)
    gate_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first, end = row_span(rows, ROWS)
    for start in range(first, end, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        inside = (row < end) & (column < columns)
        incoming = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        linear = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            z += gate_bias
            linear += up_bias
        below, level = _limited(z, linear, offset, clamp)
        value = activate(below, ACTIVATION)
        if weight_sums is not None:
            part = tl.sum(tl.where(inside, value * level * incoming, 0.0), 1)[:, None]
            tl.store(weight_sums + row * tl.num_programs(1) + tl.program_id(1), part, mask=row < end)
        if weights is not None:
            incoming *= tl.load(weights + row, mask=row < end, other=0.0).to(tl.float32)
        dz, dlinear = incoming * level, incoming * value
        if ACTIVATION == "relu":
            # Not a product: a gradient of NaN or infinity must become 0 where the slope is 0.
            dz = tl.where(below <= 0, 0.0, dz)
        elif ACTIVATION == "relu6":
            dz = tl.where((below <= 0) | (below >= 6), 0.0, dz)
        else:
            dz *= slope(below, ACTIVATION)
        if clamp is not None:
            if _PASSES_AT_LIMIT:
                dz = tl.where(z <= clamp, dz, 0.0)
                dlinear = tl.where(tl.abs(linear) <= clamp, dlinear, 0.0)
            else:
                dz = tl.where(z < clamp, dz, 0.0)
                dlinear = tl.where(tl.abs(linear) < clamp, dlinear, 0.0)
        if dgate is not None:
            tl.store(dgate + row * dgate_stride + column, dz, mask=inside)
        if dup is not None:
            tl.store(dup + row * dup_stride + column, dlinear, mask=inside)
        if bias_sums is not None:
            gate_total += tl.where(inside, dz, 0.0)
            up_total += tl.where(inside, dlinear, 0.0)
    if bias_sums is not None:
        target = bias_sums + tl.program_id(0).to(tl.int64) * (2 * columns) + column
        tl.store(target, tl.sum(gate_total, 0)[None, :], mask=column < columns)
        tl.store(target + columns, tl.sum(up_total, 0)[None, :], mask=column < columns)


def gated_activation(
    y: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    offset: float | None,
    clamp: float | None,
    *,
    activation: str,
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if any_float64(y, up, bias, weights):
        return NotImplemented
    gate, linear = _halves(y, up)
    dtype = y.dtype
    for other in (up, bias):
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    rows, columns = gate.shape
    out = y.new_empty((*y.shape[:-1], columns), dtype=dtype) if up is None else empty_like(y, dtype)
    tile = column_tile(columns)
    launch(
        _gated,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns), 1),
        (gate, linear, _contiguous(bias), _contiguous(weights), out),
        (rows,),
        (columns, gate.stride(0), linear.stride(0), offset, clamp),
        ACTIVATION=activation,
        **tile.settings,
    )
    return out


def gated_activation_backward(
    g: Tensor,
    y: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    offset: float | None,
    clamp: float | None,
    *,
    activation: str,
    needs: tuple[bool, bool, bool, bool],
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if any_float64(g, y, up, bias, weights):
        return NotImplemented
    gate, linear = _halves(y, up)
    incoming = as_rows(g)
    rows, columns = gate.shape
    dy = empty_like(y) if needs[0] else None
    dup = empty_like(up) if up is not None and needs[1] else None
    dgate, dlinear = (dy, dup) if up is not None else (None, None)
    if up is None and dy is not None:
        dgate, dlinear = _halves(dy, None)
    tile = column_tile(columns)
    blocks = cdiv(columns, tile.columns)
    programs, bias_sums, weight_sums = cdiv(rows, tile.rows), None, None
    if bias is not None and needs[2]:
        bias_sums = column_partials(rows, columns, y.device, torch.float32, tile.rows, sums=2)
        programs = len(bias_sums)
    if weights is not None and needs[3]:
        weight_sums = torch.empty(rows, blocks, device=y.device)
    strides = [0 if dx is None else columns if up is not None else 2 * columns for dx in (dgate, dlinear)]
    launch(
        _gated_backward,
        (programs, blocks, 1),
        (incoming, gate, linear, _contiguous(bias), _contiguous(weights), dgate, dlinear, bias_sums, weight_sums),
        (rows,),
        (columns, incoming.stride(0), gate.stride(0), linear.stride(0), *strides, offset, clamp),
        ACTIVATION=activation,
        **tile.settings,
    )
    dbias = None if bias_sums is None or bias is None else bias_sums.sum(0).to(bias.dtype)
    dweights = None
    if weight_sums is not None and weights is not None:
        dweights = weight_sums.sum(1).to(weights.dtype).view(weights.shape)
    return dy, dup, dbias, dweights


def _halves(y: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gate and up as rows, without `up` as views of the halves of y."""
    if up is not None:
        return as_rows(y), as_rows(up)
    rows = as_rows(y)
    half = y.shape[-1] // 2
    return rows[:, :half], rows[:, half:]


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
