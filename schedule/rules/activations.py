"""Activations as models write them, for the patterns of rules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from schedule.patterns import any_of, scalar
from schedule.rules.casts import Value

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_ROUNDING = 1e-8  # Megatron and Bloom write 0.79788456 for √(2/π), which is 3e-9 off


def _near(name: str, wanted: float) -> Any:
    return scalar(name, where=lambda value: isinstance(value, float) and abs(value - wanted) < _ROUNDING)


def _half(z: Value, one_plus: Value) -> Value:
    """Match ½·z·(1 + …), in each order of multiplication."""
    return any_of((z * 0.5) * one_plus, (z * one_plus) * 0.5, z * (one_plus * 0.5))


def _square(z: Value) -> Value:
    return any_of(z * z, torch.pow(z, 2), torch.square(z))


def tanh_of_cube(z: Value) -> Value:
    """Match GELU's tanh form, of z + 0.044715·z³."""
    cube = any_of(torch.pow(z, 3.0) * 0.044715, ((z * 0.044715) * z) * z, ((z * z) * z) * 0.044715)
    return _half(z, torch.tanh((z + cube) * _near("root", SQRT_2_OVER_PI)) + 1.0)


def tanh_of_square(z: Value) -> Value:
    """Match GELU's tanh form, of z·(1 + 0.044715·z²)."""
    inner = any_of((z * 0.044715) * z, _square(z) * 0.044715) + 1.0
    return _half(z, torch.tanh((z * _near("root", SQRT_2_OVER_PI)) * inner) + 1.0)


def erf(z: Value) -> Value:
    """Match GELU written with the error function."""
    scaled = any_of(z / _near("root2", math.sqrt(2.0)), z * _near("half_root2", math.sqrt(0.5)))
    return _half(z, torch.erf(scaled) + 1.0)


def gelu_tanh(z: Value) -> Value:
    """Match GELU's tanh form as one call."""
    return F.gelu(z, approximate="tanh")


def relu_squared(z: Value) -> Value:
    """Match ReLU squared."""
    return _square(torch.relu(z))


def clipped_at_6(z: Value) -> Value:
    """Match ReLU up to 6 as ``nn.ReLU6`` computes it."""
    return F.hardtanh(z, 0.0, 6.0)


def quick(z: Value) -> Value:
    """Match z·σ(1.702·z)."""
    return z * torch.sigmoid(z * 1.702)


def swish(z: Value) -> Value:
    """Match z·σ(z)."""
    return z * torch.sigmoid(z)


def tanh_of_softplus(z: Value) -> Value:
    """Match Mish written out, z·tanh(softplus(z))."""
    return z * torch.tanh(F.softplus(z))


def rounded_constant(scalars: dict[str, Any]) -> str:
    """Return the first inexact constant of a formula as ``name = value``, or "" if there is none.

    Only float64 shows the difference.
    """
    exact = (SQRT_2_OVER_PI, math.sqrt(2.0), math.sqrt(0.5))
    return next(
        (f"{name} = {value!r}" for name, value in scalars.items() if value is not None and value not in exact), ""
    )
