"""Star-ReLU, a squared ReLU with a learned scale and bias, in one pass.

::

    before:  y = self.scale * torch.relu(x) ** 2 + self.bias
    after:   y = fused.star_relu(x, self.scale, self.bias)

It is the activation of MetaFormers (CAFormer, ConvFormer). Eager saves the ReLU and its square, the op its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from schedule.patterns import GraphMatch, tensor
from schedule.rules.activations import relu_squared
from schedule.rules.casts import FLOATS, Value, floating
from schedule.rules.rule import DEFAULT, Form, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "star_relu"


def _number(name: str) -> Value:
    """Declare a scale or bias, one number or one of each feature."""
    return tensor(name, where=lambda spec: spec.ndim <= 1 and spec.dtype in FLOATS)


def star_relu(x: Value, scale: Value, bias: Value) -> Value:
    return relu_squared(floating("x", 2)) * _number("scale") + _number("bias")


def _extra_check(graph_match: GraphMatch) -> str:
    x, scale, bias = (spec_of(graph_match.inputs[name]) for name in ("x", "scale", "bias"))
    if x is None or scale is None or bias is None or not x.device == scale.device == bias.device:
        return "the scale or the bias is on another device, or was not seen in the recorded run"
    if scale.shape != bias.shape or tuple(scale.shape) not in ((), (1,), tuple(x.shape[-1:])):
        return f"the scale of shape {list(scale.shape)} and the bias of shape {list(bias.shape)} are not alike"
    return ""


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    return graph.call_function(fused.star_relu, (inputs["x"], inputs["scale"], inputs["bias"]))


# -- proof --------------------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, two numbers, and two rows of features."""
    sizes = (shape, (1,), (1,), shape[-1:], shape[-1:])
    return tuple(torch.randn(size, dtype=dtype) for size in sizes)


def _used_twice(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    square = torch.relu(x) ** 2
    return scale * square + bias + square


FORMS: tuple[Form, ...] = (
    lambda x, scale, bias: scale * torch.relu(x) ** 2 + bias,
    lambda x, scale, bias: bias + F.relu(x).square() * scale,
    lambda x, scale, bias, row, shift: torch.square(torch.relu(x)) * row + shift,
    lambda x, scale, bias: scale[0] * torch.relu(x).pow(2) + bias[0],
)
STAR_RELU = register_rule(
    Rule(
        name="star_relu",
        family=FAMILY,
        patterns=(star_relu,),
        build=_build,
        proof=Proof(
            FORMS,
            _inputs,
            shapes=((2, 5, 8), (3, 6)),
            refused=(
                _used_twice,
                lambda x, scale, bias: scale * torch.relu(x) ** 3 + bias,
                lambda x, scale, bias: scale * torch.square(x) + bias,
                lambda x, scale, bias: scale * torch.relu(x) ** 2 - bias,
                lambda x, scale, bias, row: scale * torch.relu(x) ** 2 + row,
                lambda x, scale, bias: torch.add(scale * torch.relu(x) ** 2, bias, alpha=2.0),
            ),
        ),
        summary="fused.star_relu(x, scale, bias)",
        extra_check=_extra_check,
        profitability=lambda graph_match: small("formula", spec_of(graph_match.inputs["x"])),
        sets=DEFAULT,
    )
)
