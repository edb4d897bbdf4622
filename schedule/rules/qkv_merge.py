"""Projections of one input to queries, keys and values as one product, with ``rules="qkv_merge"``.

::

    before:  q = F.linear(x, self.q.weight) + self.q.bias;  k = F.linear(x, self.k.weight) + self.k.bias;  v = …
    after:   q, k, v = merged_linear(x, (self.q.weight, self.k.weight, self.v.weight), (self.q.bias, …))

The parameters are not changed (:mod:`schedule.rules.merged_linear`): their values are concatenated at every call, which
costs about as much as the larger product gains, so the rule is in no set. It merges two to four Linears whose results
are split into heads afterwards, of any widths, each with or without a bias. Others are left alone: the results have
rows with gaps, which attention reads as fast as rows without, but elementwise operations do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from schedule.capture import original_class
from schedule.patterns import GraphMatch, any_of, call_module, optional, tensor
from schedule.patterns.normalized_nodes import Attr
from schedule.rules.casts import Value, floating
from schedule.rules.merged_linear import merged_linear
from schedule.rules.result_strides import told_apart
from schedule.rules.rule import Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

COUNTS = (4, 3, 2)

# -- patterns -----------------------------------------------------------------------------------------------


def _parallel(count: int) -> Callable[..., Value]:
    def projections(x: Value) -> tuple[Value, ...]:
        x = floating("x", 2)
        return tuple(_projection(x, number) for number in range(count))

    projections.__name__ = f"{count}_projections"
    return projections


def _projection(x: Value, number: int) -> Value:
    def biased(y: Value) -> Value:
        return y + tensor(f"bias_{number}", ndim=1)

    return optional(biased, name=f"biased_{number}")(F.linear(x, tensor(f"weight_{number}", ndim=2)))


def _is_other_projection(module: nn.Module) -> bool:
    """Check for a Linear of another kind, such as an adapter's or a quantized one."""
    return hasattr(module, "in_features") and original_class(module) is not nn.Linear


def _another_kind_beside(x: Value) -> tuple[Value, Value]:
    x, other = floating("x", 2), call_module(_is_other_projection)
    return any_of(F.linear(x, tensor("weight")), other(x), name="others"), other(x)


def _named(graph_match: GraphMatch) -> str:
    others = [str(node.target) for node in graph_match.outputs[1 - graph_match.choices["others"] :]]
    return f"{' and '.join(others)}: no plain Linear of torch, but an adapter's or a quantized one"


def _of(values: dict[str, Any], name: str) -> list[Any]:
    """Return the values bound to ``name_0``, ``name_1``, and so on."""
    return [values.get(f"{name}_{number}") for number in range(sum(key.startswith("weight_") for key in values))]


# -- checks -------------------------------------------------------------------------------------------------

_VIEWS = ("view", "reshape", "unflatten", "transpose", "permute", "unsqueeze", "swapaxes", "view_as")


def _extra_check(graph_match: GraphMatch) -> str:
    x, weights = spec_of(graph_match.inputs["x"]), _of(graph_match.inputs, "weight")
    specs = [spec_of(weight) for weight in weights]
    if x is None or any(spec is None or spec.shape[1:] != x.shape[-1:] for spec in specs):
        return "the input or a weight was not seen in the recorded run"
    if len({(spec.dtype, spec.device) for spec in specs if spec is not None}) > 1:
        return "the weights differ in dtype or device"
    if len({_identity(weight) for weight in weights}) < len(weights):
        return "two of them are one weight"
    for weight, bias in zip(specs, map(spec_of, _of(graph_match.inputs, "bias")), strict=True):
        if bias is not None and weight is not None and bias.shape != weight.shape[:1]:
            return "the added value is not a bias"
    width = sum(spec.shape[0] for spec in specs if spec is not None)
    for output in graph_match.outputs:
        reason = _unreadable(output, spec_of(output), width)
        if reason:
            return reason
    return ""


def _identity(weight: Any) -> Any:
    """Return a key to distinguish a bound weight from others.

    Tied weights that the graph reads by two names have two keys.
    """
    return id(weight.value) if isinstance(weight, Attr) else weight.target if weight.op == "get_attr" else weight


def _unreadable(output: fx.Node, spec: Any, width: int) -> str:
    """Return the reason if readers of a result cannot take it in rows of ``width``, else ""."""
    if spec is None:
        return "a result was not seen in the recorded run"
    dense = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    gapped = dense.new_empty(*spec.shape[:-1], width)[..., : spec.shape[-1]]
    # Caches get heads, which are transposed in eager torch too.
    return told_apart(output, dense, gapped, Tensor.is_contiguous)


def _no_gain(graph_match: GraphMatch) -> str:
    viewed = [any(user.target in _VIEWS for user in output.users) for output in graph_match.outputs]
    return "" if any(viewed) else "nothing is taken apart into heads, and results in rows with gaps are read slower"


def _profitability(graph_match: GraphMatch) -> str:
    return small("qkv_merge", spec_of(graph_match.inputs["x"]))


# -- the rule -----------------------------------------------------------------------------------------------


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    biases = _of(inputs, "bias")
    args = (inputs["x"], tuple(_of(inputs, "weight")), *([tuple(biases)] if any(biases) else []))
    return graph.call_function(merged_linear, args)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, and weights and biases of queries, keys, values and one more projection.

    Keys and values have half the width.
    """
    widths = (8, 4, 4, 8)
    scale = shape[-1] ** -0.5
    weights = [torch.randn(width, shape[-1], dtype=dtype) * scale for width in widths]
    return torch.randn(shape, dtype=dtype), *weights, *(torch.randn(width, dtype=dtype) for width in widths)


def _heads(*projections: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.view(*each.shape[:-1], -1, 2).transpose(-3, -2) for each in projections)


def _unbiased(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return _heads(F.linear(x, q), F.linear(x, k), F.linear(x, v))


def _biased(x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, qb: Tensor, kb: Tensor, vb: Tensor) -> Any:
    return _heads(F.linear(x, q, qb), F.linear(x, k) + kb, F.linear(x, v, vb))


def _whisper(x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, qb: Tensor, kb: Tensor, vb: Tensor) -> Any:
    return _heads(F.linear(x, q, qb) * 0.5, F.linear(x, k), F.linear(x, v, vb))


def _gated(x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return *_heads(F.linear(x, q), F.linear(x, k), F.linear(x, v)), torch.sigmoid(F.linear(x, g))


def _cross(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return _heads(F.linear(x * 2, q), F.linear(x, k), F.linear(x, v))


QKV_MERGE = register_rule(
    Rule(
        name="qkv_merge",
        family="qkv_merge",
        patterns=tuple(map(_parallel, COUNTS)),
        build=_build,
        proof=Proof(
            (_unbiased, _biased, _whisper, _gated, _cross),
            _inputs,
            shapes=((2, 5, 8), (1, 3, 16), (3, 1, 8)),
            refused=(
                lambda x, q, k: _heads(F.linear(x, q), F.linear(x * 2, k)),
                lambda x, q: _heads(F.linear(x, q), F.linear(x, q)),
                lambda x, q, k: (F.linear(x, q).view(-1, 2), F.linear(x, k).view(-1, 2)),
                lambda x, q, k: (F.silu(F.linear(x, q)), F.linear(x, k)),
                lambda x, q, k: (F.linear(x, q).unsqueeze(0), F.linear(F.linear(x, q), k[:, :8])),
            ),
        ),
        summary="q, k, v = merged_linear(x, weights, biases)",
        extra_check=_extra_check,
        no_gain=_no_gain,
        profitability=_profitability,
        bystanders=((_another_kind_beside, _named),),
        rank=-1,  # after the rules that fuse a bias with the operation after it
        sets=(),
    )
)
