"""Rewrite of eager attention to torch's own attention (:mod:`fused.attention`), with ``rules="attention"``.

::

    before:  weights = F.dropout(F.softmax(q @ k.transpose(-1, -2) * 0.125 + mask, dim=-1), 0.1)
             return weights @ v, weights
    after:   return attention_and_weights(q, k, v, attn_mask=mask, dropout_p=0.1, scale=0.125)

The weights ``[batch, heads, queries, keys]`` are not materialized. A module is left alone if it reads them itself, or
if the recorded run of the model reads or returns them. If it returns them and no code reads them, they are computed
when they are used after all (``output_attentions=True``, a hook).

The results agree within rounding, not bit by bit: torch's kernels sum in another order and compute the softmax of
16-bit scores in float32 throughout. On the CPU, dropout draws the same numbers as eager torch; CUDA kernels draw
others. Fully masked rows, which torch's kernels get wrong, agree with eager torch in values and gradients. Filled
scores and heads repeated for grouped queries are in :mod:`schedule.rules.attention_inputs`, products written as
``einsum`` in :mod:`schedule.rules.attention_products`. A sink becomes one more key. Soft-capped scores stay eager:
torch's attention does not support them, and FlexAttention, which does, has no backward pass on the CPU.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fused.attention import attention as attention_op
from fused.attention import attention_and_weights as attention_and_weights_op
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, any_of, optional, scalar, tensor
from schedule.rules import attention_forms as forms
from schedule.rules.attention_inputs import (
    FILLS,
    filled,
    filling,
    is_swallowing,
    leading_sizes,
    repeated,
    repetition,
    where_filled,
)
from schedule.rules.attention_products import (
    Order,
    attended,
    inverse,
    is_permuted,
    orders,
    permuted_node,
    permuted_spec,
    scores_of,
)
from schedule.rules.attention_softmax import with_sink
from schedule.rules.casts import FLOATS, Dtypes, Value, cast
from schedule.rules.constant_sizes import is_last_one
from schedule.rules.result_strides import told_apart
from schedule.rules.rule import Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "attention"


# -- patterns -----------------------------------------------------------------------------------------------


def _floats(name: str) -> Value:
    return tensor(name, where=lambda spec: spec.dtype in FLOATS)


def _scores(q: Value, k: Value) -> Value:
    def scaled(s: Value) -> Value:
        return any_of(s * scalar("scale"), s / scalar("divisor"))

    return optional(scaled, name="scaled")(scores_of(q, k))


def _weights(scores: Value) -> Value:
    def dropout(p: Value) -> Value:
        return F.dropout(p, p=scalar("p"), training=scalar("training"))

    softmaxed = F.softmax(cast("between")(scores), dim=-1, dtype=scalar("softmax_dtype"))
    return optional(dropout, name="dropout")(cast("after")(softmaxed))


def _attended(weights: Value) -> Value:
    return attended(weights, repeated("v")(_floats("v")))


def _masked(count: int, q: Value, k: Value) -> Value:
    scores = filled("filled")(_scores(_floats("q"), repeated("k")(_floats("k"))))
    for name in ("mask", "bias")[:count][::-1]:
        scores = scores + _floats(name)
    return _weights(filled("filled_last")(scores) if count else scores)


def attention(q: Value, k: Value, v: Value) -> Value:
    return _attended(_masked(0, q, k))


def masked_attention(q: Value, k: Value, v: Value, mask: Value) -> Value:
    return _attended(_masked(1, q, k))


def biased_attention(q: Value, k: Value, v: Value, bias: Value, mask: Value) -> Value:
    return _attended(_masked(2, q, k))


def _sunk(count: int, q: Value, k: Value) -> Value:
    scores = _scores(_floats("q"), repeated("k")(_floats("k")))
    return cast("dropped")(with_sink(scores + _floats("mask") if count else scores))


def sink_attention(q: Value, k: Value, v: Value, sink: Value) -> Value:
    return _attended(_sunk(0, q, k))


def masked_sink_attention(q: Value, k: Value, v: Value, mask: Value, sink: Value) -> Value:
    return _attended(_sunk(1, q, k))


def _and_weights(weights: Value) -> tuple[Value, Value]:
    return _attended(weights), weights


def attention_and_weights(q: Value, k: Value, v: Value) -> Value:
    return _and_weights(_masked(0, q, k))


def masked_attention_and_weights(q: Value, k: Value, v: Value, mask: Value) -> Value:
    return _and_weights(_masked(1, q, k))


def biased_attention_and_weights(q: Value, k: Value, v: Value, bias: Value, mask: Value) -> Value:
    return _and_weights(_masked(2, q, k))


def sink_attention_and_weights(q: Value, k: Value, v: Value, sink: Value) -> Value:
    return _and_weights(_sunk(0, q, k))


def masked_sink_attention_and_weights(q: Value, k: Value, v: Value, mask: Value, sink: Value) -> Value:
    return _and_weights(_sunk(1, q, k))


# -- checks -------------------------------------------------------------------------------------------------


def capped_weights(q: Value, k: Value) -> Value:
    capped = torch.tanh(_scores(_floats("q"), _floats("k")) / scalar("cap")) * scalar("cap_again")
    return _weights(optional(lambda s: s + _floats("mask"), name="masked")(capped))


BYSTANDERS = ((capped_weights, "the scores are capped softly, which scaled_dot_product_attention cannot"),)


def _extra_check(graph_match: GraphMatch) -> str:
    scalars = graph_match.scalars
    order = orders(scalars)
    if order is None:
        return "an einsum is not the product of queries and keys, or of weights and values"
    q, k, v = (permuted_spec(spec_of(graph_match.inputs[name]), order.get(name)) for name in ("q", "k", "v"))
    if q is None or k is None or v is None or min(q.ndim, k.ndim, v.ndim) < 3:
        return "queries, keys and values are not [..., heads, tokens, features]"
    leading = (tuple(leading_sizes(each, q, scalars, name)) for name, each in (("k", k), ("v", v)))
    if not q.dtype == k.dtype == v.dtype or any(each != q.shape[:-2] for each in leading):
        return "queries, keys and values differ in dtype, batch or heads"
    if not all(isinstance(graph_match.scalars.get(n), (int, float, type(None))) for n in ("scale", "divisor", "p")):
        return "the scale or the dropout probability is computed while running"
    if scalars.get("divisor") == 0:
        return "the scores are divided by 0"
    if not isinstance(graph_match.scalars.get("training"), (bool, type(None))):
        return "whether there is dropout is computed while running"
    narrowed = Dtypes.of(graph_match).narrowed(q.dtype, "between", "softmax_dtype", "after", "dropped")
    if narrowed is not None:
        return f"{q.dtype} scores become {narrowed}, which scaled_dot_product_attention does not imitate"
    scores = (*q.shape[:-1], k.shape[-2])
    sink = graph_match.inputs.get("sink")
    if sink is not None and not (_fits(spec_of(sink), (*scores[:-1], 1), q.dtype) and is_last_one(sink)):
        return f"the values appended to the scores are not a {q.dtype} column of sinks"
    masks = [graph_match.inputs[name] for name in ("mask", "bias") if graph_match.inputs.get(name) is not None]
    if not all(_fits(spec_of(mask), scores, q.dtype) for mask in masks):
        return f"the mask is no {q.dtype} tensor that broadcasts to the scores"
    return _not_filled_so(graph_match, scores, q.dtype) or _used(graph_match) or _not_permuted_so(graph_match, order)


def _not_filled_so(graph_match: GraphMatch, scores: tuple[int, ...], dtype: torch.dtype) -> str:
    for name in FILLS:
        fill = where_filled(graph_match.inputs, name)
        if fill is not None and not _fits(spec_of(fill), scores, torch.bool):
            return "what says which scores are filled does not broadcast to them"
        if fill is not None and not is_swallowing(graph_match.scalars, name, dtype):
            return "scores are filled with a number that is not about the lowest, so that adding it is not the same"
    return ""


def _not_permuted_so(graph_match: GraphMatch, order: dict[str, Order]) -> str:
    """Return the reason if operands or result in another order of dimensions forbid the rewrite, else ""."""
    if any(repetition(graph_match.scalars, name) and is_permuted(order.get(name)) for name in ("k", "v")):
        return "heads that come after the tokens are repeated"
    return _restride(graph_match) if is_permuted(order.get("result")) else ""


def _fits(mask: TensorSpec | None, scores: tuple[int, ...], dtype: torch.dtype) -> bool:
    if mask is None or mask.ndim > len(scores) or mask.dtype != dtype:
        return False
    return all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(scores), strict=False))


def _used(graph_match: GraphMatch) -> str:
    """Return the reason if other readers of the weights forbid the rewrite, else ""."""
    _, *weights = graph_match.outputs
    if any(user.op != "output" for each in weights for user in set(each.users) - set(graph_match.nodes)):
        return "the attention weights are used"
    return ""


def _restride(graph_match: GraphMatch) -> str:
    """Return the reason if readers can tell the result from eager's by its strides, else "".

    In memory the heads of torch's kernels come after the tokens.
    """
    result, spec = graph_match.outputs[0], spec_of(graph_match.outputs[0])
    order = (orders(graph_match.scalars) or {}).get("result")
    plain = permuted_spec(spec, None if order is None else inverse(order))
    if plain is None or 1 in plain.shape[-3:-1]:
        return "the strides of the result are not known"
    eager = torch.empty(plain.shape, dtype=plain.dtype, device="meta")
    ours = eager.transpose(-3, -2).contiguous().transpose(-3, -2)
    if order is not None:
        eager, ours = eager.permute(order), ours.permute(order)
    return told_apart(result, eager, ours)


def _profitability(graph_match: GraphMatch) -> str:
    order = orders(graph_match.scalars) or {}
    q, k = (permuted_spec(spec_of(graph_match.inputs[name]), order.get(name)) for name in ("q", "k"))
    if q is None or k is None:
        return ""
    if q.device.type == "cpu" and _dropout(graph_match.scalars):
        return "with dropout, torch's attention on the CPU is the eager one"
    return small("attention", TensorSpec((*q.shape[:-1], k.shape[-2]), q.dtype, q.device))


# -- the replacement ----------------------------------------------------------------------------------------


def _dropout(scalars: dict[str, Any]) -> float:
    return float(scalars["p"] or 0.0) if scalars.get("training") else 0.0


def _scale(scalars: dict[str, Any]) -> float:
    if scalars.get("divisor") is not None:
        return 1.0 / float(scalars["divisor"])
    return 1.0 if scalars.get("scale") is None else float(scalars["scale"])


def _operands(
    graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]
) -> tuple[tuple[fx.Node, ...], dict[str, Any]]:
    added = {"bias": inputs.get("bias"), "attn_mask": inputs.get("mask"), "sink": inputs.get("sink")}
    dtype = Dtypes(inputs, scalars).seen("q").dtype
    added |= {name: filling(graph, inputs, scalars, name, dtype) for name in FILLS}
    options = {name: value for name, value in added.items() if value is not None}
    options |= {"dropout_p": _dropout(scalars), "scale": _scale(scalars)}
    how = repetition(scalars, "k"), repetition(scalars, "v")
    if how != (None, None):
        options |= {"enable_gqa": True, "repeated": how}
    order = orders(scalars) or {}
    return tuple(permuted_node(graph, inputs[name], order.get(name)) for name in ("q", "k", "v")), options


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    result = graph.call_function(attention_op, *_operands(graph, inputs, scalars))
    return permuted_node(graph, result, (orders(scalars) or {}).get("result"))


def _build_both(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    operands, options = _operands(graph, inputs, scalars)
    options["readers"] = hooks = graph.get_attr("_forward_hooks")
    hooks.meta["spec"] = {}
    both = graph.call_function(attention_and_weights_op, operands, options)
    result, weights = (graph.call_function(operator.getitem, (both, index)) for index in range(2))
    return permuted_node(graph, result, (orders(scalars) or {}).get("result")), weights


# -- the rules ----------------------------------------------------------------------------------------------


SDPA = register_rule(
    Rule(
        name="sdpa",
        family=FAMILY,
        patterns=(masked_sink_attention, sink_attention, biased_attention, masked_attention, attention),
        build=_build,
        proof=Proof(
            (
                *(forms.llama, forms.gpt2, forms.t5, forms.bare, forms.viewed, forms.nanogpt, forms.gpt_neo, forms.mpt),
                *(forms.grouped, forms.interleaved, forms.lucidrains, forms.gpt_oss, forms.heads_after_tokens),
            ),
            forms.inputs,
            forms.SHAPES,
            refused=(
                *(forms.weights_read, forms.keys_twice, forms.heads_summed, forms.keys_for_queries),
                lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-2) @ v,
                lambda q, k, v: torch.sigmoid(q @ k.transpose(-2, -1)) @ v,
                lambda q, k, v: (torch.tanh(q @ k.transpose(-2, -1))).softmax(-1) @ v,
                lambda q, k, v: (q @ k.transpose(-2, -1)).masked_fill(q[..., :1] > 0, -9.0).softmax(-1) @ v,
            ),
        ),
        summary="attention(q, k, v, mask, p, scale=scale)",
        bystanders=BYSTANDERS,
        extra_check=_extra_check,
        profitability=_profitability,
        restride=_restride,
        rank=2,  # before its softmax, and before the rule whose placeholder no code would see
        sets=("attention",),
    )
)
SDPA_WITHOUT_WEIGHTS = register_rule(
    Rule(
        name="sdpa_without_weights",
        family=FAMILY,
        patterns=(
            masked_sink_attention_and_weights,
            sink_attention_and_weights,
            biased_attention_and_weights,
            masked_attention_and_weights,
            attention_and_weights,
        ),
        build=_build_both,
        proof=SDPA.proof,
        summary="attention(q, k, v, mask, p, scale=scale); returned weights are computed when used",
        extra_check=_extra_check,
        profitability=_profitability,
        restride=_restride,
        discards=(1,),
        rank=1,  # before its softmax
        sets=("attention",),
    )
)
