"""A bias and the activation after it, in one pass: ``act(x + bias)`` → ``fused.bias_activation(x, bias, name)``.

::

    before:  y = F.linear(x, self.fc.weight) + self.fc.bias;  z = 0.5 * y * (1 + torch.tanh(…))
    after:   z = fused.bias_activation(F.linear(x, self.fc.weight), self.fc.bias, 'gelu_tanh')

There is one rule for each activation, with every form it is written in. An activation written out as a formula is worth
a rule without a bias too: eager torch saves a tensor for each of its steps. So is Mish, whose kernel in torch takes two
to three times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
from schedule.patterns import GraphMatch, tensor
from schedule.rules.activations import (
    SQRT_2_OVER_PI,
    erf,
    gelu_tanh,
    quick,
    relu_squared,
    rounded_constant,
    swish,
    tanh_of_cube,
    tanh_of_softplus,
    tanh_of_square,
)
from schedule.rules.casts import Value
from schedule.rules.rule import Judge, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "bias_activation"

# -- patterns -----------------------------------------------------------------------------------------------


def _with_bias(activation: Callable[[Value], Value], name: str) -> Callable[..., Value]:
    def pattern(x: Value, bias: Value) -> Value:
        rows = tensor("x", where=lambda spec: spec.ndim > 1 and spec.dtype.is_floating_point)
        return activation(rows + tensor("bias", ndim=1))

    pattern.__name__ = f"bias + {name}"
    return pattern


def _alone(activation: Callable[[Value], Value], name: str) -> Callable[..., Value]:
    def pattern(x: Value) -> Value:
        return activation(tensor("x", where=lambda spec: spec.ndim > 0 and spec.dtype.is_floating_point))

    pattern.__name__ = name
    return pattern


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    x, bias = spec_of(graph_match.inputs["x"]), spec_of(graph_match.inputs.get("bias"))
    if x is None:
        return "the input was not seen in the recorded run"
    if graph_match.inputs.get("bias") is not None:
        if bias is None or not bias.dtype.is_floating_point or bias.shape != x.shape[-1:]:
            return f"the added value is not a bias of {x.shape[-1]} features"
        if bias.device != x.device:
            return f"the bias is on {bias.device}, the input on {x.device}"
    rounded = rounded_constant(graph_match.scalars)
    if rounded and x.dtype == torch.float64:
        return f"the formula's rounded constant ({rounded}) differs from the exact one in float64"
    return ""


def _saves_output(graph_match: GraphMatch) -> str:
    return (
        "eager saves only the output, which the next layer saves anyway; fused, the input would be kept as well "
        "(cost_guard=False forces it)"
    )


# -- the rules ----------------------------------------------------------------------------------------------

_SHAPES = ((2, 5, 8), (3, 16), (1, 1, 4), (2, 3, 2, 6))


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.randn(shape, dtype=dtype) * 2, torch.randn(shape[-1:], dtype=dtype)


def _rule(
    activation: str,
    *,
    formulas: tuple[Callable[[Value], Value], ...] = (),
    slow_singles: dict[Callable[[Value], Value], str] | None = None,
    singles: tuple[Callable[[Value], Value], ...] = (),
    formula_forms: tuple[Callable[[Tensor], Tensor], ...] = (),
    single_forms: tuple[Callable[[Tensor], Tensor], ...] = (),
    refused: tuple[Callable[..., Tensor], ...] = (),
    profitability_of_single: Judge | None = None,
    sets: tuple[str, ...] = ("default", "memory"),
) -> Rule:
    """Register the rule of one activation.

    Args:
        activation: its name in ``fused.bias_activation``.
        formulas: patterns of its forms with several operations.
        slow_singles: patterns of its forms with one operation that torch has a slow kernel for, each with its kind in
            :data:`THRESHOLDS`.
        singles: patterns of its forms with one operation; without a bias, there is nothing to gain from these.
        formula_forms, single_forms: the activation as models write it, for the proof; the latter with a bias only.
        refused: lookalikes that the rule must not match.
        sets: see :class:`Rule`.
    """

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        return graph.call_function(fused.bias_activation, (inputs["x"], inputs.get("bias"), activation))

    def size(kind: str) -> Judge:
        return lambda graph_match: small(kind, spec_of(graph_match.inputs["x"]))

    by_way = dict.fromkeys(formulas, size("formula"))
    by_way |= {way: size(kind) for way, kind in (slow_singles or {}).items()}
    alone = {_alone(way, way.__name__): judge for way, judge in by_way.items()}
    by_way |= dict.fromkeys(singles, profitability_of_single or size("single"))
    biased = {_with_bias(way, way.__name__): judge for way, judge in by_way.items()}
    judges = {pattern.__name__: judge for pattern, judge in (biased | alone).items()}
    reason = f"{activation} without a bias is one operation already: there is nothing to fuse"
    return register_rule(
        Rule(
            name=f"bias_{activation}",
            family=FAMILY,
            patterns=(*biased, *alone),
            build=build,
            proof=Proof(
                forms=(*map(_biased_form, (*formula_forms, *single_forms)), *formula_forms),
                inputs=_inputs,
                shapes=_SHAPES,
                refused=refused,
            ),
            summary=f"fused.bias_activation(x, bias, {activation!r})",
            extra_check=_extra_check,
            profitability=lambda graph_match: judges[graph_match.pattern.name](graph_match),
            bystanders=tuple((_alone(f, activation), reason) for f in singles),
            sets=sets,
        )
    )


def _biased_form(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, bias: activation(x + bias)


GELU_TANH = _rule(
    "gelu_tanh",
    formulas=(tanh_of_cube, tanh_of_square),
    slow_singles={gelu_tanh: "single, gelu_tanh"},
    formula_forms=(
        lambda x: 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: x * 0.5 * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * SQRT_2_OVER_PI * (1.0 + 0.044715 * x * x))),
        lambda x: x * (0.5 * (1.0 + torch.tanh(x * SQRT_2_OVER_PI * (1 + 0.044715 * x**2)))),
    ),
    single_forms=(lambda x: F.gelu(x, approximate="tanh"), nn.GELU("tanh")),
    refused=(
        lambda x, b: F.gelu(x + b),
        lambda x, b: 0.5 * (x + b) * (1.0 + torch.tanh(0.79 * (x + b + 0.044715 * torch.pow(x + b, 3.0)))),
    ),
)
GELU = _rule(
    "gelu",
    formulas=(erf,),
    singles=(F.gelu,),
    single_forms=(F.gelu, nn.GELU()),
    formula_forms=(
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5))),
    ),
    refused=(
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        lambda x, b: 0.5 * (x + b) * (1.0 + torch.erf((x + b) / 1.41)),
    ),
)
QUICK_GELU = _rule(
    "quick_gelu",
    formulas=(quick,),
    formula_forms=(lambda x: x * torch.sigmoid(1.702 * x), lambda x: torch.sigmoid(x * 1.702) * x),
    refused=(lambda x: x * torch.sigmoid(1.7 * x),),
)
SILU = _rule(
    "silu",
    formulas=(swish,),
    singles=(F.silu,),
    formula_forms=(lambda x: x * torch.sigmoid(x),),
    single_forms=(F.silu, nn.SiLU(), lambda x: F.silu(x, inplace=True)),
    refused=(lambda x, b: F.mish(x + b), lambda x, b: (x + b) * torch.sigmoid(x)),
)
MISH = _rule(
    "mish",
    formulas=(tanh_of_softplus,),
    slow_singles={F.mish: "single, mish"},
    formula_forms=(lambda x: F.softplus(x).tanh() * x, nn.Mish()),
    single_forms=(lambda x: F.mish(x, inplace=True),),
    refused=(
        lambda x: x * torch.tanh(F.softplus(x, beta=2.0)),
        lambda x: x * torch.sigmoid(F.softplus(x)),
        lambda x, b: (x + b) * torch.tanh(F.softplus(x)),
    ),
)
RELU_SQUARED = _rule(
    "relu2",
    formulas=(relu_squared,),
    formula_forms=(lambda x: torch.square(F.relu(x)), lambda x: F.relu(x) ** 2, lambda x: torch.relu(x).pow(2)),
    refused=(lambda x: F.relu(x) ** 3,),
)
RELU = _rule(
    "relu",
    singles=(F.relu,),
    single_forms=(F.relu, torch.relu, nn.ReLU(), lambda x: F.relu(x, inplace=True)),
    refused=(lambda x, b: F.leaky_relu(x + b), lambda x, b: F.relu6(x + b)),
    profitability_of_single=_saves_output,
    sets=("default",),
)
TANH = _rule(
    "tanh",
    singles=(torch.tanh,),
    single_forms=(torch.tanh, nn.Tanh(), lambda x: x.tanh()),
    refused=(lambda x, b: F.hardtanh(x + b),),
    profitability_of_single=_saves_output,
    sets=("default",),
)
