"""Cross entropy of a language model's head, without saving the logits for the backward pass.

::

    before:  logits = self.lm_head(hidden)
             loss = F.cross_entropy(logits.float().view(-1, vocab), labels.view(-1))
             return loss, logits
    after:   logits = fused.linear(hidden, self.lm_head.weight)
             loss = fused.linear_cross_entropy(hidden.flatten(0, -2), self.lm_head.weight, labels.view(-1))
             return loss, logits

Logits with other readers, such as outputs of the model, are still computed by the head. The loss is not computed from
them anymore and saves nothing of their size, so they are freed after their last reader; transformers' Trainer drops the
outputs before the backward pass. Logits without other readers are never computed as a whole.

The cost is one more product if the logits are read, a third of the head's time, so the rules are requested with
``rules="memory"``; and the gradients of the head's operands take memory from the forward pass on, except for 16-bit
dtypes on the CPU. ``torch.autograd.grad(loss, logits)`` then finds no path from one to the other. If loss and logits
are both differentiated in 16 bits, the gradient of the hidden states is the sum of two rounded gradients; eager torch
sums the gradients of the logits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, tensor
from schedule.rules import cross_entropy as plain
from schedule.rules import recomputed_layers
from schedule.rules.casts import FLOATS, Value
from schedule.rules.loss_patterns import class_weights, loss_check, loss_options, row_losses, rows_of
from schedule.rules.rule import Form, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule

# -- patterns -----------------------------------------------------------------------------------------------


def _product(hidden: Value, weight: Value) -> Value:
    return F.linear(tensor("hidden", where=lambda spec: spec.ndim >= 2 and spec.dtype in FLOATS), weight)


def _patterns(with_logits: bool) -> tuple[Callable[..., Value], ...]:
    """Return the patterns of the loss, with or without a bias and weights of the classes, the larger ones first."""
    return tuple(_pattern(biased, weighted, with_logits) for biased in (True, False) for weighted in (True, False))


def _pattern(biased: bool, weighted: bool, with_logits: bool) -> Callable[..., Value]:
    def pattern(hidden: Value, weight: Value, targets: Value) -> Value:
        logits = _product(hidden, weight)
        logits = logits + tensor("bias", ndim=1) if biased else logits
        loss = row_losses(logits, class_weights() if weighted else None)
        return (loss, logits) if with_logits else loss

    bias, weights, logits = "_bias" * biased, "weighted_" * weighted, "_and_logits" * with_logits
    pattern.__name__ = f"{weights}linear{bias}_loss{logits}"
    return pattern


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    hidden, weight = (spec_of(graph_match.inputs[name]) for name in ("hidden", "weight"))
    if hidden is None or weight is None or weight.ndim != 2:
        return "the head's input or weight was not seen in the recorded run"
    bias = spec_of(graph_match.inputs["bias"]) if graph_match.inputs.get("bias") is not None else None
    if bias is not None and bias.shape != weight.shape[:1]:
        return "the value added to the logits is not a bias"
    if not _is_width(graph_match.scalars.get("classes"), graph_match):
        return "the logits become rows of another width than the head's"
    logits = TensorSpec((*hidden.shape[:-1], weight.shape[0]), hidden.dtype, hidden.device)
    return loss_check(graph_match, logits)


def _is_width(classes: Any, graph_match: GraphMatch) -> bool:
    """Check whether logits reshaped to rows of ``classes`` columns keep the head's width at any size."""
    if classes is None:
        return True
    if classes == -1:  # whatever is left for the number of rows
        return False
    if not isinstance(classes, fx.Node):
        weight = graph_match.inputs["weight"]
        return not isinstance(weight, fx.Node) or weight.op == "get_attr"
    if classes.target is not operator.getitem or not isinstance(classes.args[0], fx.Node):
        return False
    (shape, dim), read = classes.args, classes.args[0].all_input_nodes
    spec = spec_of(read[0]) if read else None
    if spec is None or read[0] not in graph_match.nodes or not isinstance(shape, fx.Node):
        return False
    return shape.target is getattr and bool(shape.args[1] == "shape") and dim in (-1, spec.ndim - 1)


def _profitability(graph_match: GraphMatch) -> str:
    hidden = spec_of(graph_match.inputs["hidden"])
    if hidden is None:
        return ""
    rows, features = math.prod(hidden.shape[:-1]), hidden.shape[-1]
    if rows >= features:
        return ""
    return (
        f"few rows: {rows:,} of {features:,} features, so that the gradient of the weight, which is there from the "
        "forward pass on, takes more than the logits (cost_guard=False, or record with the sizes you run at)"
    )


# -- the rules ----------------------------------------------------------------------------------------------


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    hidden = rows_of(graph, inputs["hidden"], inputs, scalars)
    args = (hidden, inputs["weight"], inputs["targets"], *_bias(inputs))
    return graph.call_function(fused.linear_cross_entropy, args, loss_options(inputs, scalars))


def _build_both(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    logits = graph.call_function(recomputed_layers.linear, (inputs["hidden"], inputs["weight"], *_bias(inputs)))
    return _build(graph, inputs, scalars), logits


def _bias(inputs: dict[str, Any]) -> list[Any]:
    return [] if inputs.get("bias") is None else [inputs["bias"]]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return hidden states, labels, and the head's weight and bias, for ``shape`` = (batch, tokens, vocab)."""
    logits, labels = plain.logits_and_labels(shape, dtype)
    hidden = torch.randn(*shape[:-1], 4, dtype=dtype)
    return hidden, labels, torch.randn(shape[-1], 4, dtype=dtype), logits.reshape(-1, shape[-1])[0].clone()


def _alone(loss: Form) -> tuple[Form, Form]:
    """Return forms of the loss of a head's logits, without and with a bias."""
    return (
        lambda hidden, labels, weight: loss(F.linear(hidden, weight), labels),
        lambda hidden, labels, weight, bias: loss(F.linear(hidden, weight, bias), labels),
    )


def _with_logits(loss: Callable[..., Tensor]) -> Form:
    """Return a form of the loss and the logits.

    Logits in 16 bits are detached: the gradients of both would be rounded once more than eager's.
    """

    def form(hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(hidden, weight, bias)
        return loss(logits, labels), (logits if logits.dtype.itemsize > 2 else logits.detach()) * 2

    return form


def _refused(change: Callable[[Tensor], Tensor]) -> Form:
    """Return a form with the logits changed before the loss."""
    return lambda hidden, labels, weight: plain.causal(change(F.linear(hidden, weight)), labels)


_SHAPES = ((2, 6, 9), (3, 4, 9), (1, 2, 9))
_REFUSED = (
    _refused(torch.tanh),
    _refused(lambda logits: logits * 0.5),
    _refused(lambda logits: logits + torch.ones(logits.shape[:-1]).unsqueeze(-1)),
    *(_alone(loss)[0] for loss in plain.REFUSED),
)

LINEAR_CROSS_ENTROPY = register_rule(
    Rule(
        name="linear_cross_entropy",
        family=plain.FAMILY,
        patterns=_patterns(with_logits=False),
        build=_build,
        proof=Proof(
            tuple(form for loss in plain.FORMS for form in _alone(loss)),
            _inputs,
            _SHAPES,
            refused=(*_REFUSED, _with_logits(plain.causal)),
        ),
        summary="fused.linear_cross_entropy(hidden, weight, targets)",
        extra_check=_extra_check,
        profitability=_profitability,
        rank=1,  # before the rule below, whose logits no code would read
        sets=("memory",),
    )
)
LINEAR_CROSS_ENTROPY_AND_LOGITS = register_rule(
    Rule(
        name="linear_cross_entropy_and_logits",
        family=plain.FAMILY,
        patterns=_patterns(with_logits=True),
        build=_build_both,
        proof=Proof(tuple(map(_with_logits, plain.FORMS)), _inputs, _SHAPES, refused=_REFUSED),
        summary="fused.linear_cross_entropy(hidden, weight, targets); fused.linear(hidden, weight)",
        extra_check=_extra_check,
        profitability=_profitability,
        sets=("memory",),
    )
)
