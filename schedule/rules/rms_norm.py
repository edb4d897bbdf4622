"""RMS norms, written out or called, with the residual sum before them if there is one, in one pass.

::

    before:  s = x + r;  h = s.to(torch.float32);  h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
             y = self.norm.weight * h.to(x.dtype)
    after:   y, s = fused.add_rms_norm(x, r, self.norm.weight, 1e-06, casting='llama')

There is one rule for each position of the cast to the model's dtype, where 16-bit numbers are rounded: before the
weight (Llama, T5), after it (OLMo, ``F.rms_norm``), or after a weight stored minus 1 (Gemma); and one more for each
with the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from schedule.patterns import GraphMatch, any_of, scalar
from schedule.rules import norms
from schedule.rules.casts import Dtypes, Value, cast, must_cast, with_dtype
from schedule.rules.norms import Norm, row, wide
from schedule.rules.rule import DEFAULT, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "rms_norm"

# -- patterns -----------------------------------------------------------------------------------------------


def _mean_square(x: Value) -> Value:
    return any_of(torch.pow(x, 2), torch.square(x), x * x, name="square").mean(-1, keepdim=True)


def _root(x: Value) -> Value:
    return _mean_square(x) + scalar("eps")


def _reciprocal(x: Value) -> Value:
    root = _root(x)
    return any_of(torch.rsqrt(root), torch.pow(root, -0.5), 1.0 / torch.sqrt(root), name="root")


def _normed(x: Value) -> Value:
    widened = cast("before")(x)
    apart = x * cast("rounded")(_reciprocal(cast("squared")(x)))
    return any_of(widened * _reciprocal(widened), widened / torch.sqrt(_root(widened)), apart, name="normed")


def _llama(x: Value) -> Value:
    return row("weight") * cast("after", x)(_normed(x))


def _plain(x: Value) -> Value:
    return cast("after", x)(_normed(x))


def _torch(x: Value) -> Value:
    return must_cast("after", x)(cast("weight_cast")(row("weight")) * _normed(x))


def _gemma(x: Value) -> Value:
    factor = any_of(cast("weight_cast")(row("weight")) + 1.0, cast("weight_cast")(row("weight") + 1.0), name="factor")
    return cast("after", x)(factor * _normed(x))


def _single(x: Value) -> Value:
    return F.rms_norm(x, scalar("shape"), row("weight"), eps=scalar("eps"))


def _single_plain(x: Value) -> Value:
    return F.rms_norm(x, scalar("shape"), None, eps=scalar("eps"))


WAYS: dict[str, tuple[Callable[[Value], Value], ...]] = {
    "llama": (_llama, _plain),
    "gemma": (_gemma,),
    "torch": (_torch, _single, _single_plain),
}


# -- checks -------------------------------------------------------------------------------------------------


def _dtypes(dtypes: Dtypes, casting: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the result dtypes of the fused op and of the construct."""
    x, weight = dtypes.seen("x"), dtypes.spec("weight")
    given = dtypes.joined(x.dtype, "residual")
    wanted = dtypes.after(given, "before")
    wanted = torch.promote_types(wanted, dtypes.cast("rounded") or dtypes.cast("squared") or wanted)
    if casting == "llama":
        return dtypes.joined(given, "weight"), dtypes.joined(dtypes.after(wanted, "after"), "weight")
    if weight is not None:
        wanted = torch.promote_types(wanted, dtypes.after(weight.dtype, "weight_cast"))
    return given, dtypes.after(wanted, "after")


def _eps(inputs: dict[str, Any], scalars: dict[str, Any]) -> float:
    """Return the bound ``eps``; ``F.rms_norm`` takes the epsilon of the dtype it computes in if it is given None."""
    if scalars["eps"] is not None:
        return float(scalars["eps"])
    dtypes = Dtypes(inputs, scalars)
    computed = torch.promote_types(dtypes.joined(dtypes.seen("x").dtype, "residual"), torch.float32)
    return torch.finfo(computed).eps


def _profitability(graph_match: GraphMatch) -> str:
    single = "shape" in graph_match.pattern.scalars
    return small("rms_norm, single" if single else "rms_norm", spec_of(graph_match.inputs["x"]))


def _memory_format(scalars: dict[str, Any]) -> dict[str, Any]:
    """Return the option for the strides of ``F.rms_norm``; those of a norm written out are the default."""
    return {"memory_format": torch.contiguous_format} if "shape" in scalars else {}


# -- the rules ----------------------------------------------------------------------------------------------


def _rule(casting: str, forms: tuple[Norm, ...], refused: tuple[Norm, ...]) -> Rule:
    """Register the rule for one position of the cast.

    ``forms`` are functions of x, the weight and a bias.
    """
    options: dict[str, Any] = {} if casting == "llama" else {"casting": casting}

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        def normed(x: Any) -> fx.Node:
            args = (x, inputs.get("weight"), _eps(inputs, scalars))
            return graph.call_function(fused.rms_norm, args, options | _memory_format(scalars))

        given, wanted = _dtypes(Dtypes(inputs, scalars), casting)
        return with_dtype(graph, inputs["x"], wanted, given, normed)

    return register_rule(
        Rule(
            name=f"rms_norm_{casting}",
            family=FAMILY,
            patterns=tuple(norms.alone(way, "rms_norm") for way in WAYS[casting]),
            build=build,
            proof=Proof(forms, norms.inputs, norms.SHAPES, refused=refused),
            summary=f"fused.rms_norm(x, weight, eps, casting={casting!r})",
            extra_check=norms.extra_check,
            profitability=_profitability,
            sets=DEFAULT,
        )
    )


def _rule_after_sum(casting: str, forms: tuple[Norm, ...]) -> Rule:
    """Register the rule for one position of the cast with the residual sum.

    ``forms`` are the same as for :func:`_rule`.
    """
    options: dict[str, Any] = {} if casting == "llama" else {"casting": casting}

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        args = (inputs["x"], inputs["residual"], inputs.get("weight"), _eps(inputs, scalars))
        both = graph.call_function(fused.add_rms_norm, args, options | _memory_format(scalars))
        return norms.norm_and_sum(graph, both, *_dtypes(Dtypes(inputs, scalars), casting))

    return register_rule(
        Rule(
            name=f"add_rms_norm_{casting}",
            family=FAMILY,
            patterns=tuple(norms.after_sum(way, "rms_norm") for way in WAYS[casting]),
            build=build,
            proof=Proof(
                norms.after_sums(forms),
                norms.inputs,
                norms.SHAPES,
                refused=(
                    lambda x, w, b, r: forms[0](x + r[..., :1], w, b),
                    lambda x, w, b, r: forms[0](x - r, w, b),
                ),
            ),
            summary=f"fused.add_rms_norm(x, residual, weight, eps, casting={casting!r})",
            extra_check=norms.extra_check_of_sum(lambda dtypes: _dtypes(dtypes, casting)),
            no_gain=norms.sum_without_gain,
            profitability=_profitability,
            sets=DEFAULT,
        )
    )


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _t5(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-5)).to(weight.dtype)


def _deepseek_v4(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def _gemma4(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x32 = wide(x)
    return (x32 * torch.pow(x32.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5) * wide(weight)).type_as(x)


def _used_inside(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    square = x.pow(2)
    return weight * (x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6)) + square


FORMS: dict[str, tuple[Norm, ...]] = {
    "llama": (
        lambda x, w, b: w * _norm(wide(x)).to(x.dtype),
        lambda x, w, b: _norm(wide(x)).type_as(x) * w,
        lambda x, w, b: w * _norm(x),
        _t5,
        _deepseek_v4,
        lambda x, w, b: w * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)),
        lambda x, w, b: w * (x * (1.0 / torch.sqrt(torch.square(x).mean((-1), keepdim=True) + 1e-6))),
        lambda x, w, b: _norm(wide(x)).type_as(x),
    ),
    "gemma": (
        lambda x, w, b: (_norm(wide(x)) * (1.0 + wide(w))).type_as(x),
        lambda x, w, b: (_norm(wide(x)) * wide(1.0 + w)).to(x.dtype),
    ),
    "torch": (
        lambda x, w, b: (w * _norm(wide(x))).to(x.dtype),
        lambda x, w, b: (wide(w) * _norm(wide(x))).to(x.dtype),
        _gemma4,
        lambda x, w, b: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
        lambda x, w, b: F.rms_norm(x, (x.shape[-1],), eps=1e-6),
        lambda x, w, b: F.rms_norm(x, (x.shape[-1],), w),
    ),
}
WIDER: tuple[Norm, ...] = (lambda x, w, b: _norm(wide(x)), lambda x, w, b: w * _norm(wide(x)))

LLAMA = _rule(
    "llama",
    FORMS["llama"] + WIDER,
    refused=(
        lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)),
        lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)),
        lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
        lambda x, w, b, r: w * (x * torch.rsqrt(r.pow(2).mean(-1, keepdim=True) + 1e-6)),
        _used_inside,
    ),
)
GEMMA = _rule(
    "gemma",
    (*FORMS["gemma"], lambda x, w, b: _norm(wide(x)) * (1.0 + wide(w))),
    refused=(lambda x, w, b: (_norm(wide(x)) * (2.0 + wide(w))).type_as(x),),
)
TORCH = _rule("torch", FORMS["torch"], refused=(lambda x, w, b: F.rms_norm(x, x.shape[-2:], eps=1e-6),))
ADD_LLAMA, ADD_GEMMA, ADD_TORCH = (_rule_after_sum(casting, FORMS[casting]) for casting in WAYS)
