"""Layer norms with the scale and shift of each sample or token, in one pass.

::

    before:  n = F.layer_norm(x, (1152,), None, None, 1e-06);  y = n * (1 + scale) + shift
    after:   y = fused.adaptive_layer_norm(x, scale, shift, None, None, 1e-06)

These are the norms of diffusion transformers (DiT, PixArt, SD3, Flux, Wan). Eager saves the norm as well as its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from schedule.patterns import GraphMatch
from schedule.rules import norms
from schedule.rules.casts import Value, floating
from schedule.rules.rule import DEFAULT, Form, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "adaptive_layer_norm"


def _pattern(norm: norms.Way, shifted: bool) -> Callable[..., Value]:
    """Return the pattern of a norm that is scaled and shifted, or scaled alone."""

    def pattern(x: Value) -> Value:
        scaled = norm(floating("x")) * (floating("scale") + 1)
        return scaled + floating("shift") if shifted else scaled

    pattern.__name__ = f"{'adaptive' if shifted else 'scaled'}_layer_norm{norm.__name__}"
    return pattern


def _is_adaptive(graph_match: GraphMatch) -> bool:
    """Check for factors other than a weight and a bias of the norm (``scaled_layer_norm``)."""
    x = spec_of(graph_match.inputs["x"])
    factors = [spec_of(graph_match.inputs[name]) for name in ("scale", "shift") if name in graph_match.inputs]
    rows = [each for each in factors if x and each and each.shape == x.shape[-1:] and each.dtype == x.dtype]
    return "weight" in graph_match.inputs or "bias" in graph_match.inputs or len(rows) < len(factors)


def _extra_check(graph_match: GraphMatch) -> str:
    x = spec_of(graph_match.inputs["x"])
    for name in [name for name in ("scale", "shift") if name in graph_match.inputs]:
        factor = spec_of(graph_match.inputs[name])
        if x is None or factor is None or factor.device != x.device:
            return f"the {name} is on another device, or was not seen in the recorded run"
        if torch.broadcast_shapes(factor.shape, x.shape) != x.shape:
            return f"the {name} of shape {list(factor.shape)} makes the result larger than the norm"
    return norms.extra_check(graph_match)


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    rows = (inputs.get("weight"), inputs.get("bias"))
    args = (inputs["x"], inputs["scale"], inputs.get("shift"), *rows, scalars["eps"])
    return graph.call_function(fused.adaptive_layer_norm, args)


# -- proof --------------------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, a weight, a bias, and a scale and a shift of each sample."""
    x, weight, bias, _ = norms.inputs(shape, dtype)
    of_sample = (shape[0], *(1,) * (len(shape) - 2), shape[-1])
    return x, weight, bias, torch.randn(of_sample, dtype=dtype) / 2, torch.randn(of_sample, dtype=dtype)


def _normed(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def _used_twice(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = _normed(x, w, b)
    return y * (1 + scale) + shift + y


FORMS: tuple[Form, ...] = (
    lambda x, w, b, scale, shift: _normed(x) * (1 + scale) + shift,
    lambda x, w, b, scale, shift: shift + (scale + 1.0) * _normed(x, w, b),
    lambda x, w, b, scale, shift: _normed(x, w) * (1 + scale[:1]) + b,
    lambda x, w, b, scale, shift: _normed(x) * (scale + 1.0),
    lambda x, w, b, scale, shift: (1 + scale) * _normed(x, w, b),
)
ADAPTIVE_LAYER_NORM = register_rule(
    Rule(
        name="adaptive_layer_norm",
        family=FAMILY,
        patterns=tuple(_pattern(norm, shifted) for shifted in (True, False) for norm in norms.CALLS),
        build=_build,
        proof=Proof(
            FORMS,
            _inputs,
            norms.SHAPES,
            refused=(
                _used_twice,
                lambda x, w, b, scale, shift: _normed(x) * (2 + scale) + shift,
                lambda x, w, b, scale, shift: _normed(x) * scale + shift,
                lambda x, w, b, scale, shift: F.rms_norm(x, x.shape[-1:]) * (1 + scale) + shift,
                lambda x, w, b, scale, shift: F.layer_norm(x, x.shape[-2:]) * (1 + scale) + shift,
            ),
        ),
        summary="fused.adaptive_layer_norm(x, scale, shift, weight, bias, eps)",
        about=_is_adaptive,
        extra_check=_extra_check,
        profitability=lambda graph_match: small("adaptive_layer_norm", spec_of(graph_match.inputs["x"])),
        sets=DEFAULT,
    )
)
