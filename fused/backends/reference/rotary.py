"""Reference formulas of rotary position embedding.

The dimensions, half-split or interleaved, form pairs (a, b). With (c, c′) and (s, s′) the corresponding pairs of cos
and sin, the result is (a·c − b·s, b·c′ + a·s′). The gradient is (g·c + g′·s′, g′·c′ − g·s): the rotation back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fused.backends.reference.numbers import compute_dtype
from fused.backends.tracing import transformed

Tensor = torch.Tensor
Turn = Callable[[Tensor, Tensor, Tensor, bool, bool, torch.dtype], Tensor]
"""Formula: the rotation of x by cos and sin, interleaved or half-split, forth or back, with a result of this dtype."""


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second dimensions of the pairs, as views."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def whole(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    """Return the contiguous tensor with these first and second dimensions of the pairs."""
    return torch.stack((a, b), -1 if interleaved else -2).reshape(*a.shape[:-1], 2 * a.shape[-1])


def rotated(
    turn: Turn,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    back: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Return x with as many first dimensions turned as cos has, and those after them as they are."""
    dtype = torch.promote_types(x.dtype, cos.dtype)
    compute, dtype = compute_dtype(dtype), out_dtype or dtype
    width = cos.shape[-1]
    rest = x[..., width:] if width < x.shape[-1] else None
    turned = (x if rest is None else x[..., :width]).to(compute)
    out = turn(turned, cos.to(compute), sin.to(compute), interleaved, back, dtype)
    return out if rest is None else torch.cat((out, rest.to(dtype)), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, dtype: torch.dtype) -> Tensor:
    a, b = pairs(x, interleaved)
    s, s_ = pairs(sin, interleaved)
    # The first product has the strides that the result has in eager torch.
    out = x * cos
    across = (b * s_, a * -s) if back else (b * -s, a * s_)
    if transformed() or torch.is_grad_enabled():
        return (out + whole(*across, interleaved)).to(dtype)
    for half, added in zip(pairs(out, interleaved), across, strict=True):
        half += added
    return out.to(dtype)


def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k by the angles.

    cos and sin broadcast to both, except for the last dimension, which may be shorter. The dtype of the results is that
    of the products with cos, or `out_dtype`.
    """
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
    """Rotate the gradients back, in the dtype of their products with cos, or `out_dtype`."""
    first = rotated(_turned, g, cos, sin, interleaved, True, out_dtype)
    return first, None if g_k is None else rotated(_turned, g_k, cos, sin, interleaved, True, out_dtype)
