"""Gated activations."""

from __future__ import annotations

import torch.nn.functional as F

import fused
from tests.fused.cases import Case, Tensor, nbytes, normal
from tests.fused.cases_activations import EAGER

CLAMP = 1.5


def eager(activation: str, gate: Tensor, up: Tensor, offset: float = 0.0) -> Tensor:
    """As modeling code writes it."""
    return EAGER[activation](gate) * (up + offset if offset else up)


def clamped(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The limits of GPT-OSS, narrower."""
    return gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)


def _two(name: str) -> Case:
    return Case(
        f"gated_activation {name}",
        op=lambda gate, up: fused.gated_activation(gate, up, name),
        eager=lambda gate, up: eager(name, gate, up),
        inputs=lambda rows, columns: (normal(rows, columns), normal(rows, columns)),
        saved=nbytes,
        long=name == "mish",  # as bias_activation is compiled
    )


CASES = [
    *map(_two, EAGER),
    Case(
        "gated_activation of GPT-OSS",
        op=lambda gate, up: fused.gated_activation(gate, up, "quick_gelu", linear_offset=1.0, clamp_value=CLAMP),
        eager=lambda gate, up: eager("quick_gelu", *clamped(gate, up), 1.0),
        inputs=lambda rows, columns: (normal(rows, columns), normal(rows, columns)),
        saved=nbytes,
    ),
    Case(
        "swiglu",
        op=fused.swiglu,
        eager=lambda y: eager("silu", *y.chunk(2, -1)),
        inputs=lambda rows, columns: (normal(2, rows, 2 * columns),),
        saved=nbytes,
    ),
    Case(
        "geglu erf",
        op=lambda y: fused.geglu(y, approximate="none"),
        eager=lambda y: eager("gelu", *y.chunk(2, -1)),
        inputs=lambda rows, columns: (normal(rows, 2 * columns),),
        saved=nbytes,
    ),
    Case(
        "bias_geglu",
        op=fused.bias_geglu,
        eager=lambda y, bias: eager("gelu_tanh", *(y + bias).chunk(2, -1)),
        inputs=lambda rows, columns: (normal(2, rows, 2 * columns), normal(2 * columns)),
        saved=nbytes,
        sums=(1,),
    ),
    Case(
        "weighted_reglu",
        op=fused.weighted_reglu,
        eager=lambda y, weights: (F.relu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] * weights).to(y.dtype),
        inputs=lambda rows, columns: (normal(rows, 2 * columns), normal(rows, 1)),
        saved=nbytes,
    ),
    Case(
        "weighted_bias_quick_geglu",
        op=lambda y, bias, weights: fused.weighted_bias_quick_geglu(y, bias, weights, 1.0, clamp_value=CLAMP),
        eager=lambda y, bias, weights: (eager("quick_gelu", *clamped(*(y + bias).chunk(2, -1)), 1.0) * weights).to(
            y.dtype
        ),
        inputs=lambda rows, columns: (normal(rows, 2 * columns), normal(2 * columns), normal(rows, 1)),
        saved=nbytes,
        sums=(1,),
    ),
]
