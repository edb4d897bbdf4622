"""Residual sums with a gate of each sample, or a layer scale, in one pass.

::

    before:  y = x + gate.unsqueeze(1) * self.attn(h)
    after:   y = fused.gated_residual(x, self.attn(h), gate.unsqueeze(1))

Gates are those of diffusion transformers, ``[samples, 1, hidden]`` (DiT, PixArt, SD3, Flux, Wan); layer scales have a
number for each feature, ``[hidden]``, or for each channel, ``[channels, 1, 1]`` (CaiT, DINOv2, ConvNeXt). Eager torch
saves as much, but takes a pass more forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

import fused
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch
from schedule.rules.casts import Value, floating
from schedule.rules.rule import DEFAULT, Form, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "gated_residual"


def gated_residual(residual: Value, value: Value, gate: Value) -> Value:
    return floating("residual", 2) + floating("value", 0) * floating("gate", 0)


# -- checks -------------------------------------------------------------------------------------------------


def _factors(inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Return value and gate: the pattern binds the factors in either order, and the value has the residual's shape."""
    first, second = inputs["value"], inputs["gate"]
    residual, other = spec_of(inputs["residual"]), spec_of(first)
    return (first, second) if residual is None or other is None or other.shape == residual.shape else (second, first)


def _is_gated(graph_match: GraphMatch) -> bool:
    """Check whether the sum is that of a value and a residual of one shape, with a gate."""
    value, gate = map(spec_of, _factors(dict(graph_match.inputs)))
    residual = spec_of(graph_match.inputs["residual"])
    return residual is not None and value is not None and value.shape == residual.shape and _is_gate(gate, value)


def _is_gate(gate: TensorSpec | None, value: TensorSpec) -> bool:
    """Check whether a factor is broadcast, and varies along one dimension at most besides the samples."""
    if gate is None or gate.ndim > value.ndim:
        return False
    sizes = (1,) * (value.ndim - gate.ndim) + tuple(gate.shape)
    varies = [size != 1 for size in sizes]
    if math.prod(sizes) == math.prod(value.shape) or sum(varies[1:]) > 1:
        return False
    return all(size in (1, whole) for size, whole in zip(sizes, value.shape, strict=True))


def _extra_check(graph_match: GraphMatch) -> str:
    if not _is_gated(graph_match):
        return "this is no sum of two values of one shape, one of them with a gate of its samples, features or channels"
    devices = {spec.device for spec in map(spec_of, graph_match.inputs.values()) if spec is not None}
    return "" if len(devices) == 1 else "the summands and the gate are on different devices"


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    return graph.call_function(fused.gated_residual, (inputs["residual"], *_factors(inputs)))


# -- proof --------------------------------------------------------------------------------------------------


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a residual, a value, a gate of each sample, one of the features, and one of the channels."""
    residual, value = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    gates = ((shape[0], *(1,) * (len(shape) - 2), shape[-1]), shape[-1:], (shape[1], *(1,) * (len(shape) - 2)))
    return residual, value, *(torch.randn(each, dtype=dtype) for each in gates)


def _used_twice(x: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    gated = gate * v
    return x + gated + gated


FORMS: tuple[Form, ...] = (
    lambda x, v, gate: x + gate * v,
    lambda x, v, gate, gamma: v * gamma + x,
    lambda x, v, gate, gamma, of_channels: x + v.mul(of_channels),
)
GATED_RESIDUAL = register_rule(
    Rule(
        name="gated_residual",
        family=FAMILY,
        patterns=(gated_residual,),
        build=_build,
        proof=Proof(
            FORMS,
            _inputs,
            shapes=((2, 5, 8), (3, 4, 6), (2, 4, 3, 6)),
            refused=(
                _used_twice,
                lambda x, v, gate: x - gate * v,
                lambda x, v, gate: x + x * v,
                lambda x, v, gate: x + 0.5 * v,
                lambda x, v, gate: gate + x * v,
                lambda x, v, gate: torch.add(x, gate * v, alpha=2.0),
            ),
        ),
        summary="fused.gated_residual(residual, value, gate)",
        about=_is_gated,
        extra_check=_extra_check,
        profitability=lambda graph_match: small(FAMILY, spec_of(graph_match.inputs["residual"])),
        rank=-1,  # after the rules for a sum with the norm after it: in training they move no more bytes
        sets=DEFAULT,
    )
)
