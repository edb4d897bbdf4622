"""Activations as data: each one's value and its gradient.

Tanh and erf GELU are two activations: they differ by up to 4.7e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fused.backends.reference.numbers import compute_dtype

Tensor = torch.Tensor
_aten = torch.ops.aten

QUICK = 1.702


@dataclass(frozen=True)
class Activation:
    """`value(z)`, and `gradient(g, z)`: the gradient at z for the incoming gradient g."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _sigmoid_gradient(g: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return g * s * (1 - s)


def _tanh_gradient(g: Tensor, z: Tensor) -> Tensor:
    t = torch.tanh(z)
    return g * (1 - t * t)


def _silu_gradient(g: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return g * s * (1 + z * (1 - s))


def _quick_gelu_gradient(g: Tensor, z: Tensor) -> Tensor:
    s = torch.sigmoid(QUICK * z)
    return g * s * (1 + QUICK * z * (1 - s))


ACTIVATIONS: dict[str, Activation] = {
    # A NaN is not <= 0, so it passes its gradient on, as in torch.
    "relu": Activation(torch.relu, lambda g, z: g.masked_fill(z <= 0, 0)),
    "relu2": Activation(lambda z: torch.relu(z).square(), lambda g, z: 2 * g * torch.relu(z)),
    "silu": Activation(F.silu, _silu_gradient),
    "quick_gelu": Activation(lambda z: z * torch.sigmoid(QUICK * z), _quick_gelu_gradient),
    "gelu": Activation(F.gelu, lambda g, z: _aten.gelu_backward(g, z, approximate="none")),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda g, z: _aten.gelu_backward(g, z, approximate="tanh"),
    ),
    "tanh": Activation(torch.tanh, _tanh_gradient),
    "sigmoid": Activation(torch.sigmoid, _sigmoid_gradient),
}


def bias_activation(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """act(x + bias), computed in float32 for 16-bit numbers, in the dtype that x + bias has."""
    z, dtype = _biased(x, bias)
    return ACTIVATIONS[activation].value(z).to(dtype)


def bias_activation_backward(
    g: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients for x and for the bias, each in its own tensor's dtype; None for one not needed."""
    z, _ = _biased(x, bias)
    dz = ACTIVATIONS[activation].gradient(g.to(z.dtype), z)
    dx = dz.to(x.dtype) if needs[0] else None
    dbias = None
    if needs[1] and bias is not None:
        dbias = (dz.sum(list(range(dz.ndim - 1))) if dz.ndim > 1 else dz).to(bias.dtype)
    return dx, dbias


def _biased(x: Tensor, bias: Tensor | None) -> tuple[Tensor, torch.dtype]:
    if bias is None:
        return x.to(compute_dtype(x.dtype)), x.dtype
    dtype = torch.promote_types(x.dtype, bias.dtype)
    compute = compute_dtype(dtype)
    return x.to(compute) + bias.to(compute), dtype


def weighted_squared_relu(x: Tensor, weights: Tensor) -> Tensor:
    """relu(x)² · weights, in x's dtype."""
    compute = compute_dtype(torch.promote_types(x.dtype, weights.dtype))
    return (torch.relu(x.to(compute)).square() * weights.to(compute)).to(x.dtype)


def weighted_squared_relu_backward(
    g: Tensor, x: Tensor, weights: Tensor, *, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx = 2·relu(x)·g·w; dw = the sum of relu(x)²·g over the last dimension."""
    compute = compute_dtype(torch.promote_types(x.dtype, weights.dtype))
    r, g = torch.relu(x.to(compute)), g.to(compute)
    dx = (2 * r * g * weights.to(compute)).to(x.dtype) if needs[0] else None
    dweights = (r.square() * g).sum(-1, keepdim=True).to(weights.dtype) if needs[1] else None
    return dx, dweights
