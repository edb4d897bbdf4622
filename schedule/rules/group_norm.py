"""Group norms with the scale and shift of each sample, and the activation behind them, in one pass.

::

    before:  n = F.group_norm(x, 32, self.norm.weight, self.norm.bias, 1e-05);  y = F.silu(n * (1 + scale) + shift)
    after:   y = fused.group_norm(x, 32, self.norm.weight, self.norm.bias, 1e-05, activation='silu', scale=…, shift=…)

These are the blocks of UNets and of the autoencoders of diffusion models. Eager saves the input of the norm, of the
product and of the activation; fused, only the first. ``F.group_norm`` alone is one pass already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
from schedule.patterns import GraphMatch, scalar, tensor
from schedule.rules.activations import gelu_tanh, swish
from schedule.rules.casts import Value, floating
from schedule.rules.rule import DEFAULT, Form, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "group_norm"
Way = Callable[[Value], Value]

# -- patterns -----------------------------------------------------------------------------------------------


def _normed() -> Value:
    row = {name: tensor(name, ndim=1) for name in ("weight", "bias")}
    return F.group_norm(floating("x", 2), scalar("groups"), row["weight"], row["bias"], eps=scalar("eps"))


def _normed_plain() -> Value:
    return F.group_norm(floating("x", 2), scalar("groups"), None, None, eps=scalar("eps"))


def _scaled(normed: Value) -> Value:
    return normed * (floating("scale", 2) + 1) + floating("shift", 2)


def _as_it_is(value: Value) -> Value:
    return value


def _pattern(norm: Callable[[], Value], scaled: Way, activation: Way) -> Callable[..., Value]:
    """Return a pattern of the activation of a norm, scaled and shifted or not."""

    def of_factors(x: Value, scale: Value, shift: Value) -> Value:
        return activation(scaled(norm()))

    def of_input(x: Value) -> Value:
        return activation(scaled(norm()))

    pattern = of_factors if scaled is _scaled else of_input
    pattern.__name__ = f"{activation.__name__} of {norm.__name__}{scaled.__name__}".replace("_", " ")
    return pattern


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    x = spec_of(graph_match.inputs["x"])
    if x is None:
        return "the input was not seen in the recorded run"
    if not isinstance(graph_match.scalars.get("groups"), int):
        return "the number of groups is not a constant"
    if not isinstance(graph_match.scalars.get("eps"), (int, float)):
        return "eps is not a number"
    for name in ("weight", "bias"):
        row = spec_of(graph_match.inputs.get(name))
        if name in graph_match.inputs and (row is None or row.dtype != x.dtype or row.device != x.device):
            return f"the {name} has another dtype or device than the input"
    wanted = ((x.shape[0], 1), (x.shape[1],), *((1,) for _ in x.shape[2:]))
    for name in ("scale", "shift"):
        factor = spec_of(graph_match.inputs.get(name))
        if name not in graph_match.inputs:
            continue
        if factor is None or factor.ndim != x.ndim or factor.device != x.device:
            return f"the {name} is not one of each channel of a sample"
        if not all(size in sizes for size, sizes in zip(factor.shape, wanted, strict=True)):
            return f"the {name} of shape {list(factor.shape)} is not one of each channel of a sample"
    return ""


def _profitability(graph_match: GraphMatch) -> str:
    kind = "group_norm, scale" if "scale" in graph_match.inputs else "group_norm"
    return small(kind, spec_of(graph_match.inputs["x"]))


# -- the rules ----------------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, a weight, a bias, a scale and a shift."""
    x = torch.randn(shape, dtype=dtype) * 2
    weight, bias = torch.randn(shape[1], dtype=dtype) + 1, torch.randn(shape[1], dtype=dtype)
    of_sample = (*shape[:2], *(1,) * (len(shape) - 2))
    return x, weight, bias, torch.randn(of_sample, dtype=dtype) / 2, torch.randn(of_sample, dtype=dtype)


_SHAPES = ((2, 4, 5, 6), (3, 8, 7), (1, 4, 2, 3, 5), (5, 6))


def _forms(activation: Callable[[Tensor], Tensor], alone: bool) -> tuple[Form, ...]:
    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.group_norm(x, 2, w, b, 1e-5)

    found: tuple[Form, ...] = (
        lambda x, w, b, scale, shift: activation(norm(x, w, b) * (1 + scale) + shift),
        lambda x, w, b, scale, shift: activation(shift + (scale + 1.0) * F.group_norm(x, 2)),
    )
    if not alone:
        return found
    return (
        *found,
        lambda x, w, b, scale, shift: activation(norm(x, w, b)),
        lambda x, w, b, scale, shift: activation(F.group_norm(x, 1)),
    )


def _refused(activation: Callable[[Tensor], Tensor]) -> tuple[Form, ...]:
    def used_twice(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        normed = F.group_norm(x, 2, w, b, 1e-5)
        return activation(normed * (1 + scale) + shift) + normed

    return (
        used_twice,
        lambda x, w, b, scale, shift: activation(F.group_norm(x, 2, w, b) * (2 + scale) + shift),
        lambda x, w, b, scale, shift: activation(F.layer_norm(x, x.shape[1:]) * (1 + scale) + shift),
        lambda x, w, b, scale, shift: activation(F.group_norm(x, 2, w, b) * (1 + x) + shift),
    )


def _rule(
    name: str, activation: str | None, ways: tuple[Way, ...], forms: tuple[Callable[[Tensor], Tensor], ...]
) -> Rule:
    """Register the rule of one activation, or of the scale and shift alone."""

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        args = (inputs["x"], scalars["groups"], inputs.get("weight"), inputs.get("bias"), scalars["eps"])
        given = {"activation": activation, "scale": inputs.get("scale"), "shift": inputs.get("shift")}
        options = {key: value for key, value in given.items() if value is not None}
        return graph.call_function(fused.group_norm, args, options)

    norms = (_normed, _normed_plain)
    steps = (_scaled,) if activation is None else (_scaled, _as_it_is)
    return register_rule(
        Rule(
            name=name,
            family=FAMILY,
            patterns=tuple(_pattern(norm, step, way) for step in steps for way in ways for norm in norms),
            build=build,
            proof=Proof(
                forms=tuple(form for each in forms for form in _forms(each, alone=activation is not None)),
                inputs=_inputs,
                shapes=_SHAPES,
                refused=_refused(forms[0]),
            ),
            summary="fused.group_norm(x, groups, weight, bias, eps, …)",
            extra_check=_extra_check,
            profitability=_profitability,
            sets=DEFAULT,
        )
    )


GROUP_NORM_SILU = _rule("group_norm_silu", "silu", (F.silu, swish), (F.silu, nn.SiLU(), lambda z: z * torch.sigmoid(z)))
GROUP_NORM_GELU = _rule("group_norm_gelu", "gelu", (F.gelu,), (F.gelu, nn.GELU()))
GROUP_NORM_GELU_TANH = _rule(
    "group_norm_gelu_tanh", "gelu_tanh", (gelu_tanh,), (lambda z: F.gelu(z, approximate="tanh"),)
)
GROUP_NORM_SCALE_SHIFT = _rule("group_norm_scale_shift", None, (_as_it_is,), (lambda z: z,))
