"""Rotary position embedding written for the compiler, to compile to one loop over the pairs of dimensions."""

from __future__ import annotations

import torch

from fused.backends.reference.numbers import compute_dtype
from fused.backends.reference.rotary import pairs, whole

Tensor = torch.Tensor


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, out_dtype: torch.dtype | None
) -> Tensor:
    dtype = torch.promote_types(x.dtype, cos.dtype)
    compute = compute_dtype(dtype)
    width = cos.shape[-1]
    rest = x[..., width:] if width < x.shape[-1] else None
    a, b = pairs((x if rest is None else x[..., :width]).to(compute), interleaved)
    c, c_ = pairs(cos.to(compute), interleaved)
    s, s_ = pairs(sin.to(compute), interleaved)
    pair = (a * c + b * s_, b * c_ - a * s) if back else (a * c - b * s, b * c_ + a * s_)
    out = whole(*pair, interleaved).to(out_dtype or dtype)
    return out if rest is None else torch.cat((out, rest.to(out.dtype)), -1)


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the reference formula of this name."""
    first = _rotated(q, cos, sin, interleaved, False, out_dtype)
    return first, None if k is None else _rotated(k, cos, sin, interleaved, False, out_dtype)


def rotary_backward(
    g: Tensor,
    g_k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the reference formula of this name."""
    first = _rotated(g, cos, sin, interleaved, True, out_dtype)
    return first, None if g_k is None else _rotated(g_k, cos, sin, interleaved, True, out_dtype)
