"""Gated activations, ``act(gate) * up``, in one pass.

::

    before:  y = F.silu(self.gate_proj(x)) * self.up_proj(x)
    after:   y = fused.gated_activation(self.gate_proj(x), self.up_proj(x), 'silu')

    before:  gate, up = self.gate_up_proj(x).chunk(2, dim=-1);  y = up * F.silu(gate)
    after:   y = fused.swiglu(self.gate_up_proj(x))

There is one rule for each activation. If gate and up are the halves of one projection, the projection's output is
passed as a whole, so that its gradient is computed in one piece too. If no parameter fixes its width, where the code
splits it is passed on as well. The rules apply to dense MLPs and to experts alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from fused.gated import gated_halves
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, any_of, scalar
from schedule.rules.activations import (
    SQRT_2_OVER_PI,
    erf,
    gelu_tanh,
    quick,
    rounded_constant,
    swish,
    tanh_of_cube,
    tanh_of_square,
)
from schedule.rules.casts import Dtypes, Value, floating
from schedule.rules.constant_sizes import is_width_fixed
from schedule.rules.rule import DEFAULT, Proof, Rule
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "gated_mlp"

Activation = Callable[[Value], Value]

# -- patterns -----------------------------------------------------------------------------------------------


def _two(activation: Activation) -> Callable[..., Value]:
    def gated(gate: Value, up: Value) -> Value:
        return activation(floating("gate")) * floating("up")

    return gated


def _halves(y: Value) -> tuple[Value, Value]:
    chunks = torch.chunk(y, 2, dim=-1)
    parts = torch.split(y, scalar("half"), dim=-1)
    first = any_of(chunks[0], y[..., : scalar("half")], parts[0], name="first")
    return first, any_of(chunks[1], y[..., scalar("half") :], parts[1], name="second")


def _packed(activation: Activation) -> Callable[..., Value]:
    def packed_gated(y: Value) -> Value:
        gate, up = _halves(floating("y"))
        return activation(gate) * up

    return packed_gated


def _packed_gate_second(activation: Activation) -> Callable[..., Value]:
    def packed_gated_gate_second(y_gate_second: Value) -> Value:
        up, gate = _halves(floating("y_gate_second"))
        return activation(gate) * up

    return packed_gated_gate_second


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    dtypes = Dtypes.of(graph_match)
    rounded = rounded_constant({k: v for k, v in graph_match.scalars.items() if k != "half"})
    values = [dtypes.spec(name) for name in graph_match.inputs]
    if any(spec is None for spec in values):
        return "the input was not seen in the recorded run"
    if rounded and any(spec and spec.dtype == torch.float64 for spec in values):
        return f"the formula's rounded constant ({rounded}) differs from the exact one in float64"
    packed, half = _packed_spec(dtypes), _value(graph_match.scalars.get("half"))
    if packed is not None and (packed.shape[-1] % 2 or half not in (None, packed.shape[-1] // 2)):
        return "the parts taken of the projection are not its halves"
    return _mismatch(dtypes)


def _packed_spec(dtypes: Dtypes) -> TensorSpec | None:
    return dtypes.spec("y") or dtypes.spec("y_gate_second")


def _value(size: Any) -> Any:
    """Return a size, with the recorded value for a computed one."""
    return size.meta.get("spec") if isinstance(size, fx.Node) else size


def _no_gain(graph_match: GraphMatch) -> str:
    dtypes = Dtypes.of(graph_match)
    if graph_match.inputs.get("gate") is not None and graph_match.inputs["gate"] is graph_match.inputs["up"]:
        return "gate and up are one tensor: that is an activation of its own"
    return _mismatch(dtypes)


def _mismatch(dtypes: Dtypes) -> str:
    gate, up = dtypes.spec("gate"), dtypes.spec("up")
    if gate is not None and up is not None and (gate.shape != up.shape or gate.device != up.device):
        return "gate and up are of two shapes"
    return ""


def _profitability(graph_match: GraphMatch) -> str:
    dtypes = Dtypes.of(graph_match)
    return small("gated", dtypes.spec("gate") or _packed_spec(dtypes))


# -- the rules ----------------------------------------------------------------------------------------------

_PACKED: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "silu": (fused.swiglu, ()),
    "gelu_tanh": (fused.geglu, ()),
    "gelu": (fused.geglu, ("none",)),
    "quick_gelu": (fused.quick_geglu, ()),
    "relu": (fused.reglu, ()),
}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return gate and up."""
    return torch.randn(shape, dtype=dtype) * 2, torch.randn(shape, dtype=dtype)


_SHAPES = ((2, 5, 8), (7, 16), (2, 3, 2, 6))


def _forms(activation: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], ...]:
    """Return the forms of LLaMA, Phi-3, a sliced projection, ModernBERT, Moonshine and a sliced one, gate second."""

    def chunked(gate: Tensor, up: Tensor) -> Tensor:
        first, second = torch.cat((gate, up), dim=-1).chunk(2, dim=-1)
        return second * activation(first)

    def sliced(gate: Tensor, up: Tensor) -> Tensor:
        y, half = torch.cat((gate, up), dim=-1), gate.shape[-1]
        return activation(y[..., :half]) * y[..., half:]

    def split(gate: Tensor, up: Tensor) -> Tensor:
        parts = torch.cat((gate, up), dim=-1).split(gate.shape[-1], dim=-1)
        return activation(parts[0]) * parts[1]

    def gate_second(gate: Tensor, up: Tensor) -> Tensor:
        first, second = torch.cat((up, gate), dim=-1).chunk(2, dim=-1)
        return activation(second) * first

    def gate_sliced_second(gate: Tensor, up: Tensor) -> Tensor:
        y, half = torch.cat((up, gate), dim=-1), gate.shape[-1]
        return y[..., :half] * activation(y[..., half:])

    return (lambda gate, up: activation(gate) * up), chunked, sliced, split, gate_second, gate_sliced_second


def _rule(
    activation: str,
    ways: tuple[Activation, ...],
    forms: tuple[Callable[[Tensor], Tensor], ...],
    refused: tuple[Callable[..., Tensor], ...],
) -> Rule:
    """Register the rule of one activation.

    Args:
        activation: its name in ``fused.gated_activation``.
        ways: its patterns, written out or in one call.
        forms: the activation as models write it, for the proof; the first one is used in every form of an MLP.
        refused: lookalikes that the rule must not match.
    """

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        if "gate" in inputs:
            return graph.call_function(fused.gated_activation, (inputs["gate"], inputs["up"], activation))
        gate_first = "y" in inputs
        y = inputs["y" if gate_first else "y_gate_second"]
        is_fixed = is_width_fixed(y)
        if gate_first and is_fixed:
            function, more = _PACKED[activation]
            return graph.call_function(function, (y, *more))
        given = {"half": None if is_fixed else scalars.get("half"), "gate_first": None if gate_first else False}
        options = {name: value for name, value in given.items() if value is not None}
        return graph.call_function(gated_halves, (y, activation), options)

    others = [functools.partial(_gated_form, form) for form in forms[1:]]
    return register_rule(
        Rule(
            name=f"gated_{activation}",
            family=FAMILY,
            patterns=(*map(_packed, ways), *map(_packed_gate_second, ways), *map(_two, ways)),
            build=build,
            proof=Proof((*_forms(forms[0]), *others), _inputs, _SHAPES, refused=refused),
            summary=f"fused.gated_activation(gate, up, {activation!r})",
            extra_check=_extra_check,
            no_gain=_no_gain,
            profitability=_profitability,
            rank=1,  # before the rules for a bias and its activation, which would leave the product alone
            sets=DEFAULT,
        )
    )


def _gated_form(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _used_twice(gate: Tensor, up: Tensor) -> Tensor:
    activated = F.silu(gate)
    return activated * up + activated


SILU = _rule(
    "silu",
    (F.silu, swish),
    (F.silu, lambda x: x * torch.sigmoid(x)),
    refused=(
        _used_twice,
        lambda gate, up: F.silu(gate) + up,
        lambda gate, up: F.mish(gate) * up,
        lambda gate, up: F.silu(gate) * up[..., :1],
        lambda gate, up: F.silu(gate) * gate,
    ),
)
GELU_TANH = _rule(
    "gelu_tanh",
    (gelu_tanh, tanh_of_cube, tanh_of_square),
    (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * torch.pow(x, 3.0)))),
    ),
    refused=(lambda gate, up: F.gelu(gate) * up,),
)
GELU = _rule(
    "gelu",
    (F.gelu, erf),
    (F.gelu, lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    refused=(lambda gate, up: F.gelu(gate, approximate="tanh") * up,),
)
QUICK_GELU = _rule(
    "quick_gelu",
    (quick,),
    (lambda x: x * torch.sigmoid(1.702 * x),),
    refused=(lambda gate, up: gate * torch.sigmoid(1.7 * gate) * up,),
)
RELU = _rule(
    "relu",
    (torch.relu,),
    (F.relu,),
    refused=(lambda gate, up: F.leaky_relu(gate) * up, lambda gate, up: torch.square(F.relu(gate))),
)
