"""Rotary position embedding of queries and keys in one launch, with one read of cos and sin for all heads."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.triton.launch import cdiv, launch

Tensor = torch.Tensor
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""

# Number of elements in the block of a program.
_NUMBERS = 2048


@triton.jit
def _load_pairs(p, valid, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr):
    """Load the first and the second number of each pair, with `p` pointing to the rows."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, None, :]
        both = tl.load(p + column, mask=valid & (column < 2 * HALF), other=0.0).to(COMPUTE)
        return tl.split(tl.reshape(both, [valid.shape[0], valid.shape[1], PAIRS, 2]))
    pair = tl.arange(0, PAIRS)[None, None, :]
    inside = valid & (pair < HALF)
    return (
        tl.load(p + pair, mask=inside, other=0.0).to(COMPUTE),
        tl.load(p + HALF + pair, mask=inside, other=0.0).to(COMPUTE),
    )


@triton.jit
def _store_pairs(p, first, second, valid, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, None, :]
        both = tl.reshape(tl.join(first, second), [valid.shape[0], valid.shape[1], 2 * PAIRS])
        tl.store(p + column, both, mask=valid & (column < 2 * HALF))
    else:
        pair = tl.arange(0, PAIRS)[None, None, :]
        tl.store(p + pair, first, mask=valid & (pair < HALF))
        tl.store(p + HALF + pair, second, mask=valid & (pair < HALF))


@triton.jit
def _turn_heads(
    x, out, x_stride, out_stride, c, c_, s, s_, valid, heads,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a block of positions, with `x` and `out` pointing to the positions."""
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS))[None, :, None]
        inside = valid & (head < heads)
        source, target = x + head.to(tl.int64) * x_stride, out + head.to(tl.int64) * out_stride
        a, b = _load_pairs(source, inside, HALF, PAIRS, INTERLEAVED, COMPUTE)
        if BACK:
            turned, turned_ = a * c + b * s_, b * c_ - a * s
        else:
            turned, turned_ = a * c - b * s, b * c_ + a * s_
        _store_pairs(target, turned, turned_, inside, HALF, PAIRS, INTERLEAVED)
        if PASSED > 0:
            column = tl.arange(0, triton.next_power_of_2(PASSED))[None, None, :]
            rest = inside & (column < PASSED)
            tl.store(target + 2 * HALF + column, tl.load(source + 2 * HALF + column, mask=rest), mask=rest)


@triton.jit(do_not_specialize=["positions"])
def _turn(
    q, k, q_out, k_out, cos, sin, positions, middle, last, q_heads, k_heads,
    q_0, q_1, q_2, q_head, q_out_0, q_out_1, q_out_2, q_out_head,
    k_0, k_1, k_2, k_head, k_out_0, k_out_1, k_out_2, k_out_head,
    cos_0, cos_1, cos_2, sin_0, sin_1, sin_2,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr, POSITIONS: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """Rotate a block of positions, flattened from three dimensions; the one of the heads has size 1 there."""
    position = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS))[:, None, None]
    valid = position < positions
    n_0, n_1, n_2 = position // last // middle, position // last % middle, position % last
    n_0, n_1, n_2 = n_0.to(tl.int64), n_1.to(tl.int64), n_2.to(tl.int64)
    cos += n_0 * cos_0 + n_1 * cos_1 + n_2 * cos_2
    sin += n_0 * sin_0 + n_1 * sin_1 + n_2 * sin_2
    c, c_ = _load_pairs(cos, valid, HALF, PAIRS, INTERLEAVED, COMPUTE)
    s, s_ = _load_pairs(sin, valid, HALF, PAIRS, INTERLEAVED, COMPUTE)
    q += n_0 * q_0 + n_1 * q_1 + n_2 * q_2
    q_out += n_0 * q_out_0 + n_1 * q_out_1 + n_2 * q_out_2
    _turn_heads(
        q, q_out, q_head, q_out_head, c, c_, s, s_, valid, q_heads,
        BACK, INTERLEAVED, COMPUTE, Q_HEADS, HALF, PAIRS, PASSED,
    )  # fmt: skip
    if k is not None:
        k += n_0 * k_0 + n_1 * k_1 + n_2 * k_2
        k_out += n_0 * k_out_0 + n_1 * k_out_1 + n_2 * k_out_2
        _turn_heads(
            k, k_out, k_head, k_out_head, c, c_, s, s_, valid, k_heads,
            BACK, INTERLEAVED, COMPUTE, K_HEADS, HALF, PAIRS, PASSED,
        )  # fmt: skip


def rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool, out_dtype: torch.dtype | None = None
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for more than four dimensions."""
    return _turned(q, k, cos, sin, interleaved, back=False, out_dtype=out_dtype)


def rotary_backward(
    g: Tensor, g_k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool, out_dtype: torch.dtype | None = None
) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for more than four dimensions."""
    return _turned(g, g_k, cos, sin, interleaved, back=True, out_dtype=out_dtype)


def _turned(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    back: bool,
    out_dtype: torch.dtype | None,
) -> Any:
    if q.ndim > 4 or (k is not None and k.ndim > 4):
        return NotImplemented
    plan = _plan(_layout(q), None if k is None else _layout(k), _layout(cos), _layout(sin))
    if plan is None:
        q, k, cos, sin = _with_columns(q), None if k is None else _with_columns(k), *map(_with_columns, (cos, sin))
        if k is None or _plan(_layout(q), _layout(k), _layout(cos), _layout(sin)) is not None:
            return _turned(q, k, cos, sin, interleaved, back, out_dtype)
        alone = [_turned(x, None, cos, sin, interleaved, back, out_dtype)[0] for x in (q, k)]
        return alone[0], alone[1]
    q_out = torch.empty_like(q, dtype=out_dtype or plan.dtypes[0], memory_format=plan.strides)
    k_out = None if k is None else torch.empty_like(k, dtype=out_dtype or plan.dtypes[1], memory_format=plan.strides)
    launch(
        _turn,
        plan.grid,
        (q, k, q_out, k_out, cos, sin),
        plan.positions,
        plan.numbers,
        BACK=back,
        INTERLEAVED=interleaved,
        num_warps=4,
        **plan.settings,
    )
    return q_out, k_out


def _with_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True)
class _Plan:
    """Dtypes and strides of the results, and the arguments of the launch that depend on types and sizes alone."""

    dtypes: tuple[torch.dtype, torch.dtype]
    strides: torch.memory_format
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    positions: tuple[int]
    settings: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def _plan(q: Layout, k: Layout | None, cos: Layout, sin: Layout) -> _Plan | None:
    """Return the plan for these tensors.

    Returns None if the last dimension of one of them is not contiguous, or if q and k differ in a dimension other than
    that of the heads, and take two launches.
    """
    dim, at_once = _heads(q, None if k is None else k[0], cos, sin)
    if not at_once or any(x is not None and x[1][-1] != 1 for x in (q, k, cos, sin)):
        return None
    (shape, _, q_dtype), (angles, _, cos_dtype) = q, cos
    dtypes = torch.promote_types(q_dtype, cos_dtype), torch.promote_types((k or q)[2], cos_dtype)
    # Heads transposed after a projection are read and written in memory order; with a part that is passed through,
    # results are contiguous, as a concatenation is.
    strides = torch.preserve_format if angles[-1] == shape[-1] else torch.contiguous_format
    q_out, k_out = _result(q, strides), None if k is None else _result(k, strides)
    sizes = [1 if n == dim else _size(q, n) for n in range(3)]
    heads = [1 if x is None or dim is None else x[0][dim - 4] for x in (q, k)]
    positions = math.prod(sizes)
    half, pairs = angles[-1] // 2, _power(angles[-1] // 2)
    rows = max(_NUMBERS // (2 * pairs), 1)
    blocks = [min(_power(count), rows) for count in heads]
    together = min(rows // blocks[0], _power(positions))
    moving = itertools.chain(*(_strides(x, dim) for x in (q, q_out, k, k_out)))
    of_angles = [0 if _size(t, n) == 1 else _stride(t, n) for t in (cos, sin) for n in range(3)]
    return _Plan(
        dtypes,
        strides,
        (cdiv(positions, together), 1, 1),
        (*sizes[1:], *heads, *moving, *of_angles),
        (positions,),
        {
            "COMPUTE": tl.float64 if torch.float64 in (*dtypes, q_dtype) else tl.float32,
            "POSITIONS": together,
            "Q_HEADS": blocks[0],
            "K_HEADS": min(blocks[1], max(rows // together, 1)),
            "HALF": half,
            "PAIRS": pairs,
            "PASSED": shape[-1] - 2 * half,
        },
    )


def _result(x: Layout, strides: torch.memory_format) -> Layout:
    """Return the layout of a result."""
    like = torch.empty_strided(x[0], x[1], dtype=x[2], device="meta")
    return _layout(torch.empty_like(like, memory_format=strides))


def _heads(q: Layout, k_shape: tuple[int, ...] | None, cos: Layout, sin: Layout) -> tuple[int | None, bool]:
    """Return the dimension of the heads, and whether q and k are alike in all others.

    It is the one of four over which cos and sin are the same and q is closest in memory, or None.
    """
    shape = (1,) * (4 - len(q[0])) + q[0]
    alike = [n for n in range(3) if shape[n] > 1 and all(_size(t, n) == 1 or _stride(t, n) == 0 for t in (cos, sin))]
    dim = min(alike, key=lambda n: _stride(q, n), default=None)
    if k_shape is None:
        return dim, True
    return dim, _without((1,) * (4 - len(k_shape)) + k_shape, dim) == _without(shape, dim)


def _size(layout: Layout, dim: int) -> int:
    """Return the size of a dimension of four, 1 for leading ones that the tensor lacks."""
    return layout[0][dim - 4] if len(layout[0]) >= 4 - dim else 1


def _stride(layout: Layout, dim: int) -> int:
    return layout[1][dim - 4] if len(layout[1]) >= 4 - dim else 0


def _without(shape: tuple[int, ...], dim: int | None) -> list[int]:
    return [size for n, size in enumerate(shape) if n != dim]


def _strides(layout: Layout | None, dim: int | None) -> tuple[int, ...]:
    """Return the strides of the three leading dimensions, and that of the heads."""
    if layout is None:
        return (0,) * 4
    leading = [_stride(layout, n) for n in range(3)]
    return *leading, 0 if dim is None else leading[dim]


def _power(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()
