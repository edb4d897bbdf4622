"""Bias + activation in one kernel forward and one backward, with the sum of the bias gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.reference.activations import ACTIVATIONS, QUICK
from fused.backends.triton.arithmetic import exp, normal, reciprocal, tanh
from fused.backends.triton.launch import (
    Constant,
    as_rows,
    cdiv,
    column_block,
    column_partials,
    column_tile,
    empty_like,
    launch,
    row_block,
    row_span,
    row_tile,
)

Tensor = torch.Tensor

# In kernels these are right operands of a tensor: the interpreter does not support them as left operands.
_NORMAL = Constant(1 / math.sqrt(2 * math.pi))
_QUICK = Constant(QUICK)
# The tanh form of GELU is z·σ(u) with u = 2√(2/π)(z + 0.044715z³).
_LINEAR = Constant(2 * math.sqrt(2 / math.pi))
_CUBIC = Constant(2 * math.sqrt(2 / math.pi) * 0.044715)


@triton.jit
def logistic(u):
    """Compute σ(u) and its derivative σ(u)·σ(−u) from one exponential, without cancellation."""
    e = exp(-tl.abs(u))
    r = reciprocal(1 + e)
    return tl.where(u < 0, e * r, r), e * r * r


@triton.jit
def mish(z):
    """Compute tanh(softplus(z)) and its derivative from one exponential, without cancellation.

    With p = 1 + e⁻ᶻ and m = e⁻ᶻ for z ≥ 0, and p = 1 + eᶻ and m = 1 below, tanh(softplus(z)) is (p² − m²)/(p² + m²).
    """
    e = exp(-tl.abs(z))
    p, m = 1 + e, tl.where(z < 0, 1.0, e)
    r = reciprocal(p * p + m * m)
    return tl.where(z < 0, e * (e + 2), e * 2 + 1) * r, e * p * m * 4 * r * r


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """Compute act(z), for z in float32."""
    if ACTIVATION == "relu":
        return tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "relu2":
        return tl.where(z < 0, 0.0, z * z)
    elif ACTIVATION == "relu6":
        return tl.where(z < 0, 0.0, tl.where(z > 6, 6.0, z))
    elif ACTIVATION == "hard_swish":
        return z * tl.where(z < -3, 0.0, tl.where(z > 3, 6.0, z + 3)) / 6
    elif ACTIVATION == "silu":
        return z * logistic(z)[0]
    elif ACTIVATION == "mish":
        return z * mish(z)[0]
    elif ACTIVATION == "quick_gelu":
        return z * logistic(z * _QUICK)[0]
    elif ACTIVATION == "gelu":
        return z * normal(z)[0]
    elif ACTIVATION == "gelu_tanh":
        return z * logistic(z * (z * z * _CUBIC + _LINEAR))[0]
    elif ACTIVATION == "tanh":
        return tanh(z)
    else:
        tl.static_assert(ACTIVATION == "sigmoid", "an activation without a kernel")
        return logistic(z)[0]


@triton.jit
def slope(z, ACTIVATION: tl.constexpr, FROM_RESULT: tl.constexpr = False):
    """Compute act'(z) for z in float32, with FROM_RESULT from the result of act passed as z."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "relu2":
        return tl.where(z < 0, 0.0, 2 * z)
    elif ACTIVATION == "relu6":
        return tl.where((z <= 0) | (z >= 6), 0.0, 1.0)
    elif ACTIVATION == "hard_swish":
        return tl.where(z <= -3, 0.0, tl.where(z < 3, z / 3 + 0.5, 1.0))  # 1 for NaN, as in torch
    elif ACTIVATION == "silu":
        s, ds = logistic(z)
        return s + ds * z
    elif ACTIVATION == "mish":
        t, dt = mish(z)
        return t + dt * z
    elif ACTIVATION == "quick_gelu":
        s, ds = logistic(z * _QUICK)
        return s + ds * (z * _QUICK)
    elif ACTIVATION == "gelu":
        below, e = normal(z)
        return below + z * (e * _NORMAL)
    elif ACTIVATION == "gelu_tanh":
        square = z * z
        s, ds = logistic(z * (square * _CUBIC + _LINEAR))
        return s + ds * (square * (3 * _CUBIC) + _LINEAR) * z
    elif ACTIVATION == "tanh":
        t = z if FROM_RESULT else tanh(z)
        return 1 - t * t
    else:
        tl.static_assert(ACTIVATION == "sigmoid", "an activation without a kernel")
        return z * (1 - z) if FROM_RESULT else logistic(z)[1]


@triton.jit(do_not_specialize=["rows"])
def _activation(
    x, bias, out, rows, columns, stride,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = row_block(ROWS), column_block(COLUMNS)
    inside = (row < rows) & (column < columns)
    z = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        z += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, activate(z, ACTIVATION), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _activation_backward(
    g, x, bias, dx, partials, rows, columns, g_stride, stride,
    ACTIVATION: tl.constexpr, FROM_RESULT: tl.constexpr, BIASED: tl.constexpr, DX: tl.constexpr, SUM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = column_block(COLUMNS)
    if BIASED:
        shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first, end = row_span(rows, ROWS)
    for start in range(first, end, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        inside = (row < end) & (column < columns)
        z = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            z += shift
        dz = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == "relu":
            # Not a product: a gradient of NaN or infinity must become 0 where the slope is 0.
            dz = tl.where(z <= 0, 0.0, dz)
        elif ACTIVATION == "relu6":
            dz = tl.where((z <= 0) | (z >= 6), 0.0, dz)
        else:
            dz *= slope(z, ACTIVATION, FROM_RESULT)
        if DX:
            tl.store(dx + row * columns + column, dz, mask=inside)
        if SUM:
            total += tl.where(inside, dz, 0.0)
    if SUM:
        program = tl.program_id(0).to(tl.int64)
        tl.store(partials + program * columns + column, tl.sum(total, 0)[None, :], mask=column < columns)


def bias_activation(x: Tensor, bias: Tensor | None, *, activation: str) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    if dtype == torch.float64:
        return NotImplemented
    flat = as_rows(x)
    rows, columns = flat.shape
    out = empty_like(x, dtype)
    tile = column_tile(columns)
    launch(
        _activation,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns), 1),
        (flat, None if bias is None else bias.contiguous(), out),
        (rows,),
        (columns, flat.stride(0)),
        ACTIVATION=activation,
        BIASED=bias is not None,
        **tile.settings,
    )
    return out


def bias_activation_backward(
    g: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, needs: tuple[bool, bool]
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if torch.float64 in (g.dtype, x.dtype, None if bias is None else bias.dtype):
        return NotImplemented
    flat, g = as_rows(x), as_rows(g)
    rows, columns = flat.shape
    tile = column_tile(columns)
    dx = empty_like(x) if needs[0] else None
    partials = None
    programs = cdiv(rows, tile.rows)
    if needs[1] and bias is not None:
        partials = column_partials(rows, columns, x.device, torch.float32, tile.rows)
        programs = len(partials)
    from_result = ACTIVATIONS[activation].saves_result(x.dtype)
    biased = bias is not None and not from_result
    launch(
        _activation_backward,
        (programs, cdiv(columns, tile.columns), 1),
        (g, flat, bias.contiguous() if biased and bias is not None else None, dx, partials),
        (rows,),
        (columns, g.stride(0), flat.stride(0)),
        ACTIVATION=activation,
        FROM_RESULT=from_result,
        BIASED=biased,
        DX=dx is not None,
        SUM=partials is not None,
        **tile.settings,
    )
    return dx, None if partials is None or bias is None else partials.sum(0).to(bias.dtype)


@triton.jit(do_not_specialize=["rows"])
def _squared_relu(
    x, weights, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, column = row_block(ROWS), column_block(COLUMNS)
    inside = (row < rows) & (column < columns)
    z = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, activate(z, "relu2") * weight, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _squared_relu_backward(
    g, x, weights, dx, dweights, rows, columns, g_stride, stride,
    DX: tl.constexpr, DWEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = row_block(ROWS)
    weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        inside = (row < rows) & (column < columns)
        z = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        dz = tl.load(g + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
        if DX:
            tl.store(dx + row * columns + column, dz * slope(z, "relu2") * weight, mask=inside)
        if DWEIGHTS:
            total += tl.where(inside, activate(z, "relu2") * dz, 0.0)
    if DWEIGHTS:
        tl.store(dweights + row, tl.sum(total, 1)[:, None], mask=row < rows)


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if torch.float64 in (x.dtype, weights.dtype):
        return NotImplemented
    flat = as_rows(x)
    rows, columns = flat.shape
    out = empty_like(x)
    tile = column_tile(columns)
    launch(
        _squared_relu,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns), 1),
        (flat, weights.contiguous(), out),
        (rows,),
        (columns, flat.stride(0)),
        **tile.settings,
    )
    return out


def weighted_squared_relu_backward(g: Tensor, x: Tensor, weights: Tensor, *, needs: tuple[bool, bool]) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if torch.float64 in (g.dtype, x.dtype, weights.dtype):
        return NotImplemented
    flat, g = as_rows(x), as_rows(g)
    rows, columns = flat.shape
    dx = empty_like(x) if needs[0] else None
    dweights = empty_like(weights) if needs[1] else None
    tile = row_tile(columns, whole=4096)
    launch(
        _squared_relu_backward,
        (cdiv(rows, tile.rows), 1, 1),
        (g, flat, weights.contiguous(), dx, dweights),
        (rows,),
        (columns, g.stride(0), flat.stride(0)),
        DX=dx is not None,
        DWEIGHTS=dweights is not None,
        **tile.settings,
    )
    return dx, dweights
