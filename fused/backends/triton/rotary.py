"""Rotary position embedding of queries and keys, forward and backward, with one read and one write per number."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl

from fused.backends.triton.launch import compute_type, launch, row_block

Tensor = torch.Tensor

# Number of elements in the block of a program.
_NUMBERS = 2048


@triton.jit
def _load_pairs(p, half, pair, valid, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr):
    """Load the first and the second number of each pair, with `p` pointing to the rows."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * pair.shape[1])[None, :]
        both = tl.load(p + column, mask=valid & (column < 2 * half), other=0.0).to(COMPUTE)
        return tl.split(tl.reshape(both, [valid.shape[0], pair.shape[1], 2]))
    inside = valid & (pair < half)
    return (
        tl.load(p + pair, mask=inside, other=0.0).to(COMPUTE),
        tl.load(p + half + pair, mask=inside, other=0.0).to(COMPUTE),
    )


@triton.jit
def _store_pairs(p, first, second, half, pair, valid, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        column = tl.arange(0, 2 * pair.shape[1])[None, :]
        both = tl.reshape(tl.join(first, second), [valid.shape[0], 2 * pair.shape[1]])
        tl.store(p + column, both, mask=valid & (column < 2 * half))
    else:
        tl.store(p + pair, first, mask=valid & (pair < half))
        tl.store(p + half + pair, second, mask=valid & (pair < half))


@triton.jit
def _turn(
    x, out, cos, sin, rows, middle, last, half, passed,
    x_0, x_1, x_2, out_0, out_1, out_2, cos_0, cos_1, cos_2, sin_0, sin_1, sin_2,
    BACK: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """Rotate a block of rows, flattened from three dimensions. cos and sin may be broadcast over any of these."""
    row = row_block(ROWS)
    valid = row < rows
    n_0, n_1, n_2 = row // last // middle, row // last % middle, row % last
    x += n_0 * x_0 + n_1 * x_1 + n_2 * x_2
    out += n_0 * out_0 + n_1 * out_1 + n_2 * out_2
    cos += n_0 * cos_0 + n_1 * cos_1 + n_2 * cos_2
    sin += n_0 * sin_0 + n_1 * sin_1 + n_2 * sin_2
    pair = tl.arange(0, PAIRS)[None, :]
    a, b = _load_pairs(x, half, pair, valid, INTERLEAVED, COMPUTE)
    c, c_ = _load_pairs(cos, half, pair, valid, INTERLEAVED, COMPUTE)
    s, s_ = _load_pairs(sin, half, pair, valid, INTERLEAVED, COMPUTE)
    if BACK:
        first, second = a * c + b * s_, b * c_ - a * s
    else:
        first, second = a * c - b * s, b * c_ + a * s_
    _store_pairs(out, first, second, half, pair, valid, INTERLEAVED)
    if PASSED:
        column = tl.arange(0, PASSED)[None, :]
        inside = valid & (column < passed)
        tl.store(out + 2 * half + column, tl.load(x + 2 * half + column, mask=inside), mask=inside)


def rotary(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for more than four dimensions."""
    return _turned(q, k, cos, sin, interleaved, back=False)


def rotary_backward(g: Tensor, g_k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Any:
    """Compute the reference formula of this name, or return NotImplemented for more than four dimensions."""
    return _turned(g, g_k, cos, sin, interleaved, back=True)


def _turned(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Any:
    if max(q.ndim, 0 if k is None else k.ndim) > 4:
        return NotImplemented
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    return tuple(None if x is None else _one_turned(x, cos, sin, interleaved, back) for x in (q, k))


def _one_turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    width, whole = cos.shape[-1], x.shape[-1]
    first, middle, last = (1,) * (4 - x.ndim) + x.shape[:-1]
    rows, pairs = first * middle * last, triton.next_power_of_2(max(width // 2, 1))
    at_once = max(_NUMBERS // (2 * pairs), 1)
    strides = [_strides(t, (first, middle, last)) for t in (x, out, cos, sin)]
    launch(
        _turn,
        (triton.cdiv(rows, at_once),),
        *(x, out, cos, sin, rows, middle, last, width // 2, whole - width, *itertools.chain(*strides)),
        BACK=back,
        INTERLEAVED=interleaved,
        COMPUTE=compute_type(x, cos),
        ROWS=at_once,
        PAIRS=pairs,
        PASSED=triton.next_power_of_2(whole - width) if whole > width else 0,
        num_warps=4,
    )
    return out


def _strides(tensor: Tensor, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the three leading dimensions, 0 for broadcast ones."""
    whole = tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)
    return whole.expand(*leading, tensor.shape[-1]).stride()[:3]
