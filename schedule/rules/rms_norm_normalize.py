"""RMS norms written with ``F.normalize``, in one pass.

::

    before:  y = F.normalize(x, dim=-1) * self.scale * self.g      # the scale is √features
    after:   y = fused.rms_norm(x, self.g, 1e-24 / features)

These are the norms of x-transformers and its kin. ``F.normalize`` divides by ``max(‖x‖, eps)``, the fused op by
``√(‖x‖² + eps²)``: the same for rows of zeros, and to the last bit for rows much longer than eps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from schedule.patterns import GraphMatch, scalar
from schedule.rules import norms
from schedule.rules.casts import Value, floating
from schedule.rules.norms import row
from schedule.rules.rule import DEFAULT, Form, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "rms_norm"
_LARGEST_EPS = 1e-8
_SMALLEST_EPS = 1e-15


def _unit() -> Value:
    return F.normalize(floating("x"), p=2.0, dim=scalar("dim"), eps=scalar("eps"))


def _scaled_first(x: Value) -> Value:
    return _unit() * scalar("scale") * row("weight")


def _scaled_last(x: Value) -> Value:
    return _unit() * row("weight") * scalar("scale")


def _scaled_weight(x: Value) -> Value:
    return _unit() * (row("weight") * scalar("scale"))


def _plain(x: Value) -> Value:
    return _unit() * scalar("scale")


def _extra_check(graph_match: GraphMatch) -> str:
    x, weight = spec_of(graph_match.inputs["x"]), graph_match.inputs.get("weight")
    if x is None:
        return "the input was not seen in the recorded run"
    dim, eps, scale = (graph_match.scalars[name] for name in ("dim", "eps", "scale"))
    if dim not in (-1, x.ndim - 1):
        return "another dimension than the last is normalized"
    if x.dtype not in (torch.float32, torch.float64):
        return f"{x.dtype} is normalized in {x.dtype}, which the fused op does not imitate"
    if not isinstance(eps, float) or not _SMALLEST_EPS <= eps <= _LARGEST_EPS:
        return f"eps is not between {_SMALLEST_EPS} and {_LARGEST_EPS}: short rows would come out differently"
    if not isinstance(scale, (int, float)) or not math.isclose(scale, math.sqrt(x.shape[-1]), rel_tol=1e-12):
        return f"the factor is not the root of {x.shape[-1]} features"
    if weight is not None:
        spec = spec_of(weight)
        if spec is None or spec.shape not in (x.shape[-1:], (1,)) or (spec.dtype, spec.device) != (x.dtype, x.device):
            return f"the weight is none of 1 or {x.shape[-1]} features in {x.dtype}"
    return ""


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    eps = scalars["eps"] ** 2 / spec_of(inputs["x"]).shape[-1]  # type: ignore[union-attr]
    return graph.call_function(fused.rms_norm, (inputs["x"], inputs.get("weight"), eps))


# -- proof --------------------------------------------------------------------------------------------------


def _root(x: Tensor) -> float:
    return float(x.shape[-1] ** 0.5)


def _used_twice(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    unit = F.normalize(x, dim=-1)
    return unit * _root(x) * w + unit


FORMS: tuple[Form, ...] = (
    lambda x, w, b, r: F.normalize(x, dim=-1) * _root(x) * w,
    lambda x, w, b, r: F.normalize(x, p=2, dim=x.ndim - 1) * w * _root(x),
    lambda x, w, b, r: (_root(x) * w) * F.normalize(x + r, dim=-1, eps=1e-10),
    lambda x, w, b, r: _root(x) * F.normalize(x, 2.0, -1),
    lambda x, w, b, r: F.normalize(x, dim=-1) * math.sqrt(x.shape[-1]) * (w + 1.0),
    lambda x, w, b, r: F.normalize(x, dim=-1) * _root(x) * w[:1],
)
RMS_NORM_NORMALIZE = register_rule(
    Rule(
        name="rms_norm_normalize",
        family=FAMILY,
        patterns=(_scaled_first, _scaled_last, _scaled_weight, _plain),
        build=_build,
        proof=Proof(
            FORMS,
            norms.inputs,
            norms.SHAPES,
            dtypes=(torch.float64, torch.float32),
            refused=(
                _used_twice,
                lambda x, w, b, r: F.normalize(x, dim=-2) * _root(x) * w,
                lambda x, w, b, r: F.normalize(x, p=1.0, dim=-1) * _root(x) * w,
                lambda x, w, b, r: F.normalize(x, dim=-1) * x.shape[-1] * w,
                lambda x, w, b, r: F.normalize(x, dim=-1, eps=1e-5) * _root(x) * w,
                lambda x, w, b, r: F.normalize(x, dim=-1) * w,
            ),
        ),
        summary="fused.rms_norm(x, weight, eps² / features)",
        extra_check=_extra_check,
        profitability=lambda graph_match: small("rms_norm", spec_of(graph_match.inputs["x"])),
        sets=DEFAULT,
    )
)
