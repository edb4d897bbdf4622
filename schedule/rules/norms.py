"""Shared parts of the norm rules: the residual sum before the norm, and checks for unsupported norms."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from schedule.patterns import GraphMatch, scalar, tensor
from schedule.patterns.side_effects import effects
from schedule.rules.casts import Dtypes, Value, cast_node, floating
from schedule.rules.rule import Form, Judge, spec_of

Norm = Callable[..., Tensor]
Way = Callable[[Value], Value]
Flow = Callable[[Dtypes], tuple[torch.dtype, torch.dtype]]
"""Returns the result dtypes of the fused op and of the construct."""


# -- patterns -----------------------------------------------------------------------------------------------


def alone(way: Way, name: str) -> Callable[..., Value]:
    """Return the pattern of a norm of ``x``."""

    def pattern(x: Value) -> Value:
        return way(floating("x"))

    pattern.__name__ = name + way.__name__
    return pattern


def after_sum(way: Way, name: str) -> Callable[..., Value]:
    """Return the pattern of a norm of ``x + residual``, and of the sum."""

    def pattern(x: Value, residual: Value) -> Value:
        total = floating("x") + floating("residual")
        return way(total), total

    pattern.__name__ = f"add_{name}{way.__name__}"
    return pattern


def row(name: str) -> Value:
    """Declare a weight or bias of the norm in a pattern."""
    return tensor(name, ndim=1)


def _single(x: Value) -> Value:
    return F.layer_norm(x, scalar("shape"), row("weight"), row("bias"), eps=scalar("eps"))


def _single_without_bias(x: Value) -> Value:
    return F.layer_norm(x, scalar("shape"), row("weight"), None, eps=scalar("eps"))


def _single_plain(x: Value) -> Value:
    return F.layer_norm(x, scalar("shape"), None, None, eps=scalar("eps"))


CALLS = (_single, _single_without_bias, _single_plain)
"""Patterns of ``F.layer_norm``, with a weight and bias, a weight, and neither."""


def _scaled(x: Value) -> Value:
    return _single_plain(x) * row("weight")


def _scaled_and_shifted(x: Value) -> Value:
    return _scaled(x) + row("bias")


SCALED = (_scaled_and_shifted, _scaled)
"""Patterns of ``F.layer_norm`` without parameters and of a product of it with a weight, with a bias and without."""


# -- checks -------------------------------------------------------------------------------------------------


def extra_check(graph_match: GraphMatch) -> str:
    """Return the reason if the fused op does not compute this norm, else ""."""
    dtypes = Dtypes.of(graph_match)
    x = dtypes.spec("x")
    if x is None:
        return "the input was not seen in the recorded run"
    for name in ("weight", "bias"):
        spec = dtypes.spec(name)
        if name in graph_match.inputs and (spec is None or spec.shape != x.shape[-1:] or spec.device != x.device):
            return f"the {name} is none of {x.shape[-1]} features"
    if not _one_dimension(graph_match.scalars.get("shape", 1)):
        return "more than the last dimension is normalized"
    if not isinstance(graph_match.scalars.get("eps"), (int, float, type(None))):
        return "eps is not a number"
    total = dtypes.joined(x.dtype, "residual")
    narrow = dtypes.narrowed(total, "before", "squared", "rounded")
    return f"{total} is normalized in {narrow}, which the fused op does not imitate" if narrow else ""


def _one_dimension(shape: Any) -> bool:
    """Check whether the bound ``normalized_shape`` is the last dimension alone."""
    shape = shape.meta.get("spec") if isinstance(shape, fx.Node) else shape
    return isinstance(shape, int) or (isinstance(shape, (tuple, list)) and len(shape) == 1)


def extra_check_of_sum(flow: Flow) -> Judge:
    """Return a check as :func:`extra_check` for a norm and its sum, also rejecting a norm wider than the sum.

    Widening x would widen the sum too.
    """

    def judge(graph_match: GraphMatch) -> str:
        reason = extra_check(graph_match) or sum_without_gain(graph_match)
        if reason:
            return reason
        given, out = flow(Dtypes.of(graph_match))[0], spec_of(graph_match.outputs[0])
        fits = out is not None and torch.promote_types(given, out.dtype) == given
        return "" if fits else "the norm has a wider dtype than the sum"

    return judge


def sum_without_gain(graph_match: GraphMatch) -> str:
    """Return the reason if only the norm after the sum could be fused, or "" if both can."""
    dtypes = Dtypes.of(graph_match)
    x, residual = dtypes.spec("x"), dtypes.spec("residual")
    if x is None or residual is None or x.shape != residual.shape or x.device != residual.device:
        return "the added value is not a residual: its shape differs from that of the other summand"
    if any(_is_seen_outside(total, graph_match.nodes) for total in graph_match.outputs[1:]):
        return "the sum leaves the graph, and the norm must be computed from it: a gradient of the sum may be asked for"
    return ""


def _is_seen_outside(value: fx.Node, region: Collection[fx.Node]) -> bool:
    """Check whether code outside of the graph may see the value itself, not only what is computed from it.

    Readers in ``region`` do not count.
    """
    waiting = [value]
    while waiting:
        for user in set(waiting.pop().users).difference(region):
            known = effects(user)
            if known.opaque or user.op == "call_module":
                return True
            if not known.fresh:  # it may return the value as it is
                waiting.append(user)
    return False


# -- the replacement ----------------------------------------------------------------------------------------


def norm_and_sum(graph: fx.Graph, both: fx.Node, given: torch.dtype, wanted: torch.dtype) -> Any:
    """Return the norm and the sum from a fused op, with the norm cast to the dtype of the construct.

    A norm that is computed wider than the sum was accepted only if it is cast to the sum's dtype in the end.
    """
    if torch.promote_types(given, wanted) == wanted:
        return both
    normed, total = (graph.call_function(operator.getitem, (both, n)) for n in range(2))
    return cast_node(graph, normed, wanted), total


# -- proof --------------------------------------------------------------------------------------------------

SHAPES = ((2, 5, 8), (3, 16), (2, 3, 2, 6))


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, a weight, a bias and a residual."""
    x, residual = torch.randn(shape, dtype=dtype) * 2, torch.randn(shape, dtype=dtype)
    weight, bias = torch.randn(shape[-1:], dtype=dtype) + 1, torch.randn(shape[-1:], dtype=dtype)
    return x, weight, bias, residual


def after_sums(forms: tuple[Norm, ...]) -> tuple[Form, ...]:
    """Return the forms of x, weight and bias after a sum with another reader.

    The first form is included once more with a sum that has no other reader.
    """

    def used_again(form: Norm) -> Form:
        def block(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
            total = residual + x
            return form(total, weight, bias) * 2, total * 3

        return block

    return (lambda x, weight, bias, residual: forms[0](x + residual, weight, bias), *map(used_again, forms))


def wide(x: Tensor) -> Tensor:
    """Return ``x.float()``, but keep float64.

    Rules leave float64 inputs alone if a model casts them to float32.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
