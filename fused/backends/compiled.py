"""Formulas written for the compiler, for better code than from the reference formulas.

They are never differentiated, so `abs` and `where` are safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fused.backends.reference.activations import ACTIVATIONS, biased
from fused.backends.reference.numbers import sum_over_rows, with_block_sums
from fused.backends.tracing import computed_first

Tensor = torch.Tensor

# GELU's tanh form is z·σ(u) with u = 2√(2/π)(z + 0.044715z³): one exponential, and no cancellation.
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715


def _tanh_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z * (_LINEAR + _CUBIC * z * z))


def tanh_gelu_pair(z: Tensor) -> tuple[Tensor, Tensor]:
    """Compute GELU's tanh form and its slope from one exponential."""
    square = z * z
    u = z * (_LINEAR + _CUBIC * square)
    e = torch.exp(-u.abs())
    r = 1 / (1 + e)
    s = r * torch.where(u < 0, e, 1.0)
    return z * s, s + z * (_LINEAR + 3 * _CUBIC * square) * e * r * r


# Abramowitz and Stegun 7.1.26: erfc(x) = t(a₁ + a₂t + … + a₅t⁴)·exp(-x²), t = 1/(1 + px), within 1.5e-7.
_P = 0.3275911
_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def erf_gelu_pair(z: Tensor) -> tuple[Tensor, Tensor]:
    """Compute GELU, z·Φ(z), and its slope from one exponential."""
    e = torch.exp(-0.5 * z * z)
    t = 1 / (1 + (_P * math.sqrt(0.5)) * z.abs())
    tail = t * (_A[0] + t * (_A[1] + t * (_A[2] + t * (_A[3] + t * _A[4])))) * e * 0.5
    normal = torch.where(z < 0, tail, 1 - tail)
    return z * normal, normal + z * e * (1 / math.sqrt(2 * math.pi))


def mish_pair(z: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Mish, z·tanh(softplus(z)), and its slope from one exponential.

    With p = 1 + e⁻ᶻ and m = e⁻ᶻ for z ≥ 0, and p = 1 + eᶻ and m = 1 below, tanh(softplus(z)) is (p² − m²)/(p² + m²).
    """
    e = torch.exp(-z.abs())
    p, m = 1 + e, torch.where(z < 0, 1.0, e)
    r = 1 / (p * p + m * m)
    t = torch.where(z < 0, e * (2 + e), 1 + 2 * e) * r
    return z * t, t + 4 * z * (p * e * m) * r * r


VALUES: dict[str, Callable[[Tensor], Tensor]] = {"gelu_tanh": _tanh_gelu, "mish": lambda z: mish_pair(z)[0]}
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_tanh": lambda g, z: g * tanh_gelu_pair(z)[1],
    "mish": lambda g, z: g * mish_pair(z)[1],
}


def bias_activation(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """Compute the reference formula of this name."""
    z, dtype = biased(x, bias)
    return VALUES.get(activation, ACTIVATIONS[activation].value)(z).to(dtype)


def bias_activation_backward(
    g: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the reference formula of this name."""
    entry = ACTIVATIONS[activation]
    from_result = entry.result_gradient if entry.saves_result(x.dtype) else None

    def gradient(g: Tensor, x: Tensor) -> Tensor:
        z, _ = biased(x, bias if from_result is None else None)
        return (from_result or _GRADIENTS.get(activation, entry.gradient))(g.to(z.dtype), z)

    if not needs[1] or bias is None:
        return gradient(g, x).to(x.dtype) if needs[0] else None, None
    if not needs[0]:
        return None, sum_over_rows(gradient(g, x)).to(bias.dtype)

    def with_itself(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        d = gradient(g, x)
        return d.to(x.dtype), d

    dx, of_blocks = with_block_sums(with_itself, g, x)
    return dx, sum_over_rows(computed_first(of_blocks)).to(bias.dtype)
