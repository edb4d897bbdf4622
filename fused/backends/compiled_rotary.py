"""Rotary position embedding written for the compiler, to compile to one loop over the pairs of dimensions."""

from __future__ import annotations

import torch

from fused.backends.reference.rotary import pairs, rotated, whole

Tensor = torch.Tensor


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, dtype: torch.dtype) -> Tensor:
    (a, b), (c, c_), (s, s_) = (pairs(each, interleaved) for each in (x, cos, sin))
    pair = (a * c + b * s_, b * c_ - a * s) if back else (a * c - b * s, b * c_ + a * s_)
    # Rounded before they are joined: the compiler writes joined tensors to memory.
    return whole(pair[0].to(dtype), pair[1].to(dtype), interleaved)


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
    first = rotated(_turned, q, cos, sin, interleaved, False, out_dtype)
    return first, None if k is None else rotated(_turned, k, cos, sin, interleaved, False, out_dtype)


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
    first = rotated(_turned, g, cos, sin, interleaved, True, out_dtype)
    return first, None if g_k is None else rotated(_turned, g_k, cos, sin, interleaved, True, out_dtype)
