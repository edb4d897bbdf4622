"""Reference formulas of a gated residual sum: y = residual + value·gate.

The gradient of the value is g·gate; that of the gate is Σ g·value over the dimensions that it is broadcast along.
"""

from __future__ import annotations

import torch

from fused.backends.reference.numbers import compute_dtype, reduce_to
from fused.backends.tracing import is_compiled, watched

Tensor = torch.Tensor


def gated_residual(residual: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """Compute residual + value·gate in the dtype of this sum. torch's kernel rounds 16-bit numbers once."""
    return torch.addcmul(residual, value, gate)


def gated_residual_backward(
    g: Tensor, value: Tensor | None, gate: Tensor, *, value_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of value and gate, or None if not needed.

    Args:
        value: None if the gate needs no gradient.
        value_dtype: None if the value needs no gradient.
    """
    g = g.to(compute_dtype(g.dtype))
    of_value = of_gate = product = None
    if value is not None:
        product = g * value.to(g.dtype)
        of_gate = reduce_to(product, gate.shape).to(gate.dtype)
    if value_dtype is not None:
        # The product is no longer needed once it is summed: a new tensor costs as much as the pass.
        is_plain = torch.is_grad_enabled() or is_compiled() or watched((g, gate)) or gate.numel() == g.numel()
        of_value = torch.mul(g, gate.to(g.dtype), out=None if is_plain else product).to(value_dtype)
    return of_value, of_gate
