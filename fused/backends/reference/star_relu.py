"""Reference formulas of star-ReLU: y = scale·relu(x)² + bias.

The gradient of x is 2·g·scale·relu(x), that of the scale Σ g·relu(x)², and that of the bias Σ g.
"""

from __future__ import annotations

import torch

from fused.backends.reference.numbers import compute_dtype, reduce_to, with_block_sums
from fused.backends.tracing import is_compiled

Tensor = torch.Tensor


def star_relu(x: Tensor, scale: Tensor, bias: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Compute scale·relu(x)² + bias."""
    compute = compute_dtype(out_dtype)
    return (torch.relu(x.to(compute)).square() * scale.to(compute) + bias.to(compute)).to(out_dtype)


def star_relu_backward(
    g: Tensor, x: Tensor, scale: Tensor, *, bias_dtype: torch.dtype | None, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, scale and bias, or None if not needed.

    Args:
        bias_dtype: None if the bias, which has the shape of the scale, needs no gradient.
        needs: whether x and the scale do.
    """

    def terms(g: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        g = g.to(compute_dtype(g.dtype))
        positive = torch.relu(x.to(g.dtype))
        of_x = (2 * g * scale.to(g.dtype) * positive).to(x.dtype) if needs[0] else None
        return of_x, g * positive.square() if needs[1] else None, g

    in_one_loop = is_compiled() and x.is_cpu and scale.numel() == 1
    of_x, of_scale, of_bias = with_block_sums(terms, g, x) if in_one_loop else terms(g, x)
    return (
        of_x,
        None if of_scale is None else reduce_to(of_scale, scale.shape).to(scale.dtype),
        None if of_bias is None or bias_dtype is None else reduce_to(of_bias, scale.shape).to(bias_dtype),
    )
