"""Reference formulas of gated activations, act(gate)·(up + offset)·weights, and of their gradients.

Gate and up are two tensors, or the halves of the last dimension of one. A clamp limits the gate from above and
the up from both sides, after the bias; clamped elements have no gradient, and those at the limit that of `torch.clamp`.
"""

from __future__ import annotations

import torch

from fused.backends.reference.activations import ACTIVATIONS
from fused.backends.reference.numbers import compute_dtype, sum_over_rows
from fused.backends.tracing import transformed
from fused.torch_internals.modes import without_dispatch_modes

Tensor = torch.Tensor
Number = float | Tensor
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def gated_activation(
    y: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    offset: Number | None,
    clamp: Number | None,
    *,
    activation: str,
) -> Tensor:
    """Compute act(gate)·(up + offset)·weights in the dtype of gate and up, internally in float32 for 16-bit numbers.

    Args:
        y: the gate ``[..., hidden]``; or gate and up concatenated, ``[..., 2·hidden]``, if `up` is None.
        up: ``[..., hidden]``, or None.
        bias: ``[2·hidden]`` for a y of that size, or None.
        weights: ``[..., 1]``, or None.
        offset, clamp: numbers, or None for none.
    """
    entry = ACTIVATIONS[activation]
    half = y.shape[-1] // 2 if up is None else y.shape[-1]
    gate, linear, dtype = operands(y, up, bias, weights, half)
    gate, linear = limited(gate, linear, offset, clamp)
    precise = entry.precise_value if dtype == torch.float32 and not transformed() else None
    out = (precise or entry.value)(gate) * linear
    return (out if weights is None else out * weights.to(out.dtype)).to(dtype)


def gated_activation_backward(
    g: Tensor,
    y: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    offset: Number | None,
    clamp: Number | None,
    *,
    activation: str,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Compute the gradients of y, up, bias and weights in the dtypes of these, or None if not needed."""
    entry = ACTIVATIONS[activation]
    gate, linear, dtype = operands(y, up, bias, weights, g.shape[-1])
    g = g.to(gate.dtype)
    below, level = limited(gate, linear, offset, clamp)
    single = dtype == torch.float32
    a = (entry.precise_value if single and entry.precise_value else entry.value)(below)
    dweights = None
    if weights is not None:
        dweights = (a * level * g).sum(-1, keepdim=True).to(weights.dtype) if needs[3] else None
        g = g * weights.to(g.dtype)
    dgate = (entry.precise_gradient if single and entry.precise_gradient else entry.gradient)(g * level, below)
    dgate, dlinear = unlimited(dgate, g * a, gate, linear, clamp)
    dbias = None
    if bias is not None and needs[2]:
        dbias = torch.cat([sum_over_rows(part) for part in (dgate, dlinear)], -1).to(bias.dtype)
    if up is not None:
        return (
            dgate.to(y.dtype) if needs[0] else None,
            dlinear.to(up.dtype) if needs[1] else None,
            dbias,
            dweights,
        )
    dy = torch.cat((dgate.to(y.dtype), dlinear.to(y.dtype)), -1) if needs[0] else None
    return dy, None, dbias, dweights


def operands(
    y: Tensor, up: Tensor | None, bias: Tensor | None, weights: Tensor | None, half: int
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return gate and up with their bias in the compute dtype, and the dtype of the result."""
    dtype = y.dtype
    for other in (up, bias):
        if other is not None and other.dtype != dtype:
            dtype = torch.promote_types(dtype, other.dtype)
    wide = dtype if weights is None else torch.promote_types(dtype, weights.dtype)
    compute = compute_dtype(wide)
    gate, linear = (y.narrow(-1, 0, half), y.narrow(-1, half, half)) if up is None else (y, up)
    gate, linear = gate.to(compute), linear.to(compute)
    if bias is not None:
        bias = bias.to(compute)
        gate, linear = gate + bias.narrow(0, 0, half), linear + bias.narrow(0, half, half)
    return gate, linear, dtype


def limited(gate: Tensor, linear: Tensor, offset: Number | None, clamp: Number | None) -> tuple[Tensor, Tensor]:
    """Compute min(gate, clamp), and the up clamped to −clamp … clamp plus the offset."""
    if clamp is not None:
        gate = gate.clamp(max=clamp)
        # The type stubs accept two numbers or two tensors, but not a union of both.
        linear = linear.clamp(min=-clamp, max=clamp)  # type: ignore[arg-type]
    return gate, linear if offset is None else linear + offset


def unlimited(
    dgate: Tensor, dlinear: Tensor, gate: Tensor, linear: Tensor, clamp: Number | None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the inputs of `limited` from those of its results."""
    if clamp is None:
        return dgate, dlinear
    if PASSES_AT_LIMIT:
        return torch.where(gate <= clamp, dgate, 0), torch.where(linear.abs() <= clamp, dlinear, 0)
    return torch.where(gate < clamp, dgate, 0), torch.where(linear.abs() < clamp, dlinear, 0)


def _passes_at_limit() -> bool:
    with torch.inference_mode(False), torch.enable_grad(), without_dispatch_modes():
        one = torch.ones(1, device="cpu", requires_grad=True)
        (gradient,) = torch.autograd.grad(one.clamp(max=1.0), one)
    return gradient.item() == 1


PASSES_AT_LIMIT = _passes_at_limit()
"""Whether `torch.clamp` has a gradient at its limit: 1 up to torch 2.13, 0 from 2.14 on."""
