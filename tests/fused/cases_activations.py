"""Bias + activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, nbytes, normal

EAGER = {
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square().to(z.dtype),  # CUDA's autocast widens powers
    "relu6": F.relu6,
    "hard_swish": F.hardswish,
    "silu": F.silu,
    "mish": F.mish,
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def _bias_activation(name: str) -> Case:
    return Case(
        f"bias_activation {name}",
        op=lambda x, bias: fused.bias_activation(x, bias, name),
        eager=lambda x, bias: EAGER[name](x + bias),
        inputs=lambda rows, columns: (normal(2, rows, columns), normal(columns)),
        saved=lambda x, bias: nbytes(x, bias),
        sums=(1,),
        long=name not in ("relu", "gelu", "gelu_tanh"),  # the others are compiled alike
    )


CASES = [
    *map(_bias_activation, EAGER),
    Case(
        "new_gelu",
        op=fused.new_gelu,
        eager=lambda x: F.gelu(x, approximate="tanh"),
        inputs=lambda rows, columns: (normal(rows, columns),),
        saved=nbytes,
    ),
    Case(
        "weighted_squared_relu",
        op=fused.weighted_squared_relu,
        eager=lambda x, weights: (F.relu(x).square() * weights).to(x.dtype),
        inputs=lambda rows, columns: (normal(rows, columns), normal(rows, 1)),
        saved=nbytes,
    ),
]
