"""Layer norms written out, and any layer norm with the residual sum before it, in one pass.

::

    before:  s = x + r;  y = F.layer_norm(s, (768,), self.ln.weight, self.ln.bias, 1e-05)
    after:   y, s = fused.add_layer_norm(x, r, self.ln.weight, self.ln.bias, 1e-05)

    before:  y = F.layer_norm(x, (768,)) * (self.gamma + 1)
    after:   y = F.layer_norm(x, (768,), self.gamma + 1)

``F.layer_norm`` alone is one pass already; a norm written out (Cohere, DeBERTa) saves a tensor for each of its steps.
With ``rules="memory"`` the former is rewritten too, so that the layers behind it need not save its result
(:mod:`schedule.rules.recomputed_input`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from schedule.patterns import GraphMatch, any_of, scalar
from schedule.rules import norms
from schedule.rules.casts import Dtypes, Value, cast, with_dtype
from schedule.rules.norms import row, wide
from schedule.rules.recomputation_cost import costly_again
from schedule.rules.rule import DEFAULT, Build, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "layer_norm"

# -- patterns -----------------------------------------------------------------------------------------------


def _square(x: Value) -> Value:
    return any_of(torch.pow(x, 2), torch.square(x), x * x, name="square")


def _divided(centered: Value, variance: Value) -> Value:
    total = variance + scalar("eps")
    return any_of(centered * torch.rsqrt(total), centered / torch.sqrt(total), name="divided")


def _normed(x: Value) -> Value:
    widened = cast("before")(x)
    mean = widened.mean(-1, keepdim=True)
    once = widened - mean
    variances = (
        (once, _square(once).mean(-1, keepdim=True)),
        (widened - mean, _square(widened - mean).mean(-1, keepdim=True)),
        (once, widened.var(-1, unbiased=False, keepdim=True)),
    )
    return any_of(*(_divided(*each) for each in variances), name="normed")


def _written(x: Value) -> Value:
    return cast("after", x)(cast("between", x)(_normed(x)) * cast("weight_cast")(row("weight")) + row("bias"))


def _written_without_bias(x: Value) -> Value:
    return cast("after", x)(cast("between", x)(_normed(x)) * cast("weight_cast")(row("weight")))


def _written_plain(x: Value) -> Value:
    return cast("after", x)(_normed(x))


WRITTEN = (_written, _written_without_bias, _written_plain)


# -- checks -------------------------------------------------------------------------------------------------


def _dtypes(dtypes: Dtypes) -> tuple[torch.dtype, torch.dtype]:
    """Return the result dtypes of the fused op and of the construct."""
    x, weight = dtypes.seen("x"), dtypes.spec("weight")
    given = dtypes.joined(x.dtype, "residual")
    if "shape" in dtypes.scalars:
        return given, given
    wanted = dtypes.after(dtypes.after(given, "before"), "between")
    if weight is not None:
        wanted = dtypes.joined(torch.promote_types(wanted, dtypes.after(weight.dtype, "weight_cast")), "bias")
    return given, dtypes.after(wanted, "after")


def _scaled_check(graph_match: GraphMatch) -> str:
    dtypes = Dtypes.of(graph_match)
    x = dtypes.spec("x")
    wider = x is not None and dtypes.joined(x.dtype, "weight", "bias") != x.dtype
    return norms.extra_check(graph_match) or ("the weight makes the result wider than the norm" if wider else "")


def _profitability(graph_match: GraphMatch) -> str:
    single = "shape" in graph_match.pattern.scalars
    return small("layer_norm, sum" if single else "layer_norm", spec_of(graph_match.inputs["x"]))


def _profitability_of_call(graph_match: GraphMatch) -> str:
    normal = graph_match.normal
    return costly_again(normal.of[graph_match.outputs[0]], normal)


# -- the rules ----------------------------------------------------------------------------------------------


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    def normed(x: Any) -> fx.Node:
        args = (x, inputs.get("weight"), inputs.get("bias"), scalars["eps"])
        return graph.call_function(fused.layer_norm, args, _memory_format(scalars))

    given, wanted = _dtypes(Dtypes(inputs, scalars))
    return with_dtype(graph, inputs["x"], wanted, given, normed)


def _build_scaled(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    dtypes = {spec.dtype for spec in map(spec_of, inputs.values()) if spec is not None}
    # torch's kernel takes one dtype, and sums the gradient of the weight in 16 bits if that is of 16 bits.
    if len(dtypes) > 1 or any(dtype.itemsize < 4 for dtype in dtypes):
        return _build(graph, inputs, scalars)
    args = (inputs["x"], scalars["shape"], inputs["weight"], inputs.get("bias"), scalars["eps"])
    return graph.call_function(F.layer_norm, args)


def _memory_format(scalars: dict[str, Any]) -> dict[str, Any]:
    """Return the option for the strides of a norm written out; those of ``F.layer_norm`` are the default."""
    return {} if "shape" in scalars else {"memory_format": torch.preserve_format}


def _build_after_sum(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
    args = (inputs["x"], inputs["residual"], inputs.get("weight"), inputs.get("bias"), scalars["eps"])
    both = graph.call_function(fused.add_layer_norm, args, _memory_format(scalars))
    return norms.norm_and_sum(graph, both, *_dtypes(Dtypes(inputs, scalars)))


def _cohere(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x32 = wide(x)
    mean = x32.mean(-1, keepdim=True)
    variance = (x32 - mean).pow(2).mean(-1, keepdim=True)
    return (wide(w) * ((x32 - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def _deberta(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x32 = wide(x)
    mean = x32.mean(-1, keepdim=True)
    variance = (x32 - mean).pow(2).mean(-1, keepdim=True)
    return w * ((x32 - mean) / torch.sqrt(variance + 1e-7)).to(x.dtype) + b


def _pocket_tts(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5) * w + b


def _centered_once(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centered = x - x.mean(dim=-1, keepdim=True)
    return centered / torch.sqrt(torch.square(centered).mean(-1, keepdim=True) + 1e-5)


WRITTEN_FORMS = (_cohere, _deberta, _pocket_tts, _centered_once)
SINGLE_FORMS: tuple[norms.Norm, ...] = (
    lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b, 1e-5),
    lambda x, w, b: F.layer_norm(x, (x.shape[-1],), weight=w),
    lambda x, w, b: F.layer_norm(x, (x.shape[-1],), eps=1e-6),
)
SCALED_FORMS: tuple[norms.Norm, ...] = (
    lambda x, w, b: F.layer_norm(x, (x.shape[-1],)) * w + b,
    lambda x, w, b: (w + 1) * F.layer_norm(x, (x.shape[-1],), eps=1e-6),
)


def _unbiased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)


def _of_another_mean(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    centered = x - r.mean(-1, keepdim=True)
    return w * (centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)) + b


LAYER_NORM = register_rule(
    Rule(
        name="layer_norm",
        family=FAMILY,
        patterns=tuple(norms.alone(way, "layer_norm") for way in WRITTEN),
        build=_build,
        proof=Proof(
            WRITTEN_FORMS,
            norms.inputs,
            norms.SHAPES,
            refused=(
                _unbiased,
                _of_another_mean,
                lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b),
                lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
            ),
        ),
        summary="fused.layer_norm(x, weight, bias, eps)",
        extra_check=norms.extra_check,
        profitability=_profitability,
        sets=DEFAULT,
    )
)
CALLED_LAYER_NORM = register_rule(
    Rule(
        name="called_layer_norm",
        family=FAMILY,
        patterns=tuple(norms.alone(way, "called_layer_norm") for way in norms.CALLS),
        build=_build,
        proof=Proof(
            SINGLE_FORMS,
            norms.inputs,
            norms.SHAPES,
            refused=(
                lambda x, w, b: F.layer_norm(x, x.shape[-2:]),
                lambda x, w, b: F.group_norm(x, 1, eps=1e-6),
            ),
        ),
        summary="fused.layer_norm(x, weight, bias, eps), which can be computed again",
        extra_check=norms.extra_check,
        profitability=_profitability_of_call,
        rank=-1,  # after the norm with the sum before it
        sets=("memory",),
    )
)


def _scaled_rule(name: str, build: Build, summary: str, rank: int, sets: tuple[str, ...]) -> Rule:
    return register_rule(
        Rule(
            name=name,
            family=FAMILY,
            patterns=tuple(norms.alone(way, name) for way in norms.SCALED),
            build=build,
            proof=Proof(
                SCALED_FORMS,
                norms.inputs,
                norms.SHAPES,
                refused=(
                    lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w) * b,
                    lambda x, w, b: F.layer_norm(x, x.shape[-2:]) * w,
                    lambda x, w, b: F.layer_norm(x, (x.shape[-1],)) * x,
                    lambda x, w, b: F.layer_norm(x, (x.shape[-1],)) / w,
                ),
            ),
            summary=summary,
            extra_check=_scaled_check,
            rank=rank,
            sets=sets,
        )
    )


CALLED_SCALED_LAYER_NORM = _scaled_rule("called_scaled_layer_norm", _build, CALLED_LAYER_NORM.summary, -1, ("memory",))
SCALED_LAYER_NORM = _scaled_rule(
    "scaled_layer_norm", _build_scaled, "F.layer_norm(x, shape, weight, bias, eps)", -2, ("default",)
)
ADD_LAYER_NORM = register_rule(
    Rule(
        name="add_layer_norm",
        family=FAMILY,
        patterns=tuple(norms.after_sum(way, "layer_norm") for way in (*WRITTEN, *norms.CALLS)),
        build=_build_after_sum,
        proof=Proof(
            norms.after_sums(WRITTEN_FORMS + SINGLE_FORMS),
            norms.inputs,
            norms.SHAPES,
            refused=(
                lambda x, w, b, r: F.layer_norm(x + r[..., :1], (x.shape[-1],), w, b),
                lambda x, w, b, r: F.layer_norm(x + 1.0, (x.shape[-1],), w, b),
                lambda x, w, b, r: F.layer_norm(x + r, x.shape[-2:]),
            ),
        ),
        summary="fused.add_layer_norm(x, residual, weight, bias, eps)",
        extra_check=norms.extra_check_of_sum(_dtypes),
        no_gain=norms.sum_without_gain,
        profitability=_profitability,
        sets=("default",),  # for time: eager saves the sum too, and the rule above saves as much memory by itself
    )
)
