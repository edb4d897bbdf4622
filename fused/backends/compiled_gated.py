"""Gated activations written for the compiler, with one exponential for an activation and its slope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends.compiled import VALUES, erf_gelu_pair, mish_pair, tanh_gelu_pair
from fused.backends.reference.activations import ACTIVATIONS, QUICK
from fused.backends.reference.gated import Gradients, Number, limited, operands, unlimited
from fused.backends.reference.numbers import sum_over_rows

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def _sigmoid_gated(z: Tensor, steepness: float = 1.0) -> Pair:
    s = torch.sigmoid(z if steepness == 1.0 else steepness * z)
    a = z * s
    return a, s + steepness * a * (1 - s)


def _relu2(z: Tensor) -> Pair:
    r = torch.relu(z)
    return r * r, 2 * r


def _tanh(z: Tensor) -> Pair:
    t = torch.tanh(z)
    return t, 1 - t * t


def _sigmoid(z: Tensor) -> Pair:
    s = torch.sigmoid(z)
    return s, s * (1 - s)


def _hard_swish(z: Tensor) -> Pair:
    slope = torch.where(z < 3, z / 3 + 0.5, 1.0)
    return F.hardswish(z), torch.where(z <= -3, 0.0, slope)


# Where the slope is 0, of activations that are straight elsewhere.
_FLAT: dict[str, Callable[[Tensor], Tensor]] = {"relu": lambda z: z <= 0, "relu6": lambda z: (z <= 0) | (z >= 6)}

# An activation and its slope.
_PAIRS: dict[str, Callable[[Tensor], Pair]] = {
    "relu": lambda z: (torch.relu(z), torch.where(_FLAT["relu"](z), 0.0, 1.0)),
    "relu2": _relu2,
    "relu6": lambda z: (F.relu6(z), torch.where(_FLAT["relu6"](z), 0.0, 1.0)),
    "hard_swish": _hard_swish,
    "silu": _sigmoid_gated,
    "mish": mish_pair,
    "quick_gelu": lambda z: _sigmoid_gated(z, QUICK),
    "gelu": erf_gelu_pair,
    "gelu_tanh": tanh_gelu_pair,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
}


def _halves(whole: Any, half: int | None = None) -> Pair:
    """Return the gate, which is the second half, and the up."""
    half = whole.shape[-1] // 2 if half is None else half
    return whole.narrow(-1, half, half), whole.narrow(-1, 0, half)


def gated_activation(
    y: Tensor | None,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    offset: Number | None,
    clamp: Number | None,
    *,
    activation: str,
) -> Tensor:
    """Compute the reference formula of this name.

    Args:
        y, up: as there; or None and a tensor with the up in its first half and the gate in its second.
    """
    if y is None:
        y, up = _halves(up)
    half = y.shape[-1] // 2 if up is None else y.shape[-1]
    gate, linear, dtype = operands(y, up, bias, weights, half)
    gate, linear = limited(gate, linear, offset, clamp)
    out = VALUES.get(activation, ACTIVATIONS[activation].value)(gate) * linear
    return (out if weights is None else out * weights.to(out.dtype)).to(dtype)


def gated_activation_backward(
    g: Tensor,
    y: Tensor | None,
    up: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    offset: Number | None,
    clamp: Number | None,
    *,
    activation: str,
    needs: tuple[bool, bool, bool, bool],
) -> Gradients:
    """Compute the reference formula of this name. The gradient of two halves of one tensor takes the place of y's."""
    is_whole, up_first = y is None or up is None, y is None
    # The half is g's size, not a quotient: otherwise the compiler treats two equal sizes as different, and loops twice.
    half = g.shape[-1]
    if y is None:
        y, up = _halves(up, half)
    gate, linear, _ = operands(y, up, bias, weights, half)
    g = g.to(gate.dtype)
    below, level = limited(gate, linear, offset, clamp)
    a, slope = _PAIRS[activation](below)
    dweights = None
    if weights is not None:
        dweights = (a * level * g).sum(-1, keepdim=True).to(weights.dtype) if needs[3] else None
        g = g * weights.to(g.dtype)
    dgate = g * level * slope
    if activation in _FLAT:
        # Not a product: a gradient of NaN or infinity must become 0 where the slope is 0.
        dgate = torch.where(_FLAT[activation](below), 0, g * level)
    dgate, dlinear = unlimited(dgate, g * a, gate, linear, clamp)
    if up is not None and not is_whole:
        return (
            dgate.to(y.dtype) if needs[0] else None,
            dlinear.to(up.dtype) if needs[1] else None,
            None,
            dweights,
        )
    # Gate and up may be passed as one tensor: it needs a gradient if either of them does.
    wanted = needs[0] or needs[1]
    parts = (dlinear, dgate) if up_first else (dgate, dlinear)
    dy = torch.cat([part.to(y.dtype) for part in parts], -1) if wanted else None
    of_bias = None
    if bias is not None and needs[2]:
        of_bias = torch.cat([sum_over_rows(part) for part in (dgate, dlinear)], -1).to(bias.dtype)
    return dy, None, of_bias, dweights
