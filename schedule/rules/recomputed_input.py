"""Layers that do not save their input where a fused op can compute it again, with ``rules="memory"``.

::

    before:  y = F.linear(fused.layer_norm(x, self.norm.weight, …), self.fc.weight);  z = F.conv2d(h, self.conv.weight)
    after:   y = recomputed_layers.linear(fused.layer_norm(x, …), self.fc.weight)
             z = recomputed_layers.conv2d(h, self.conv.weight)

A layer saves its input for the gradient of its weight. Where that is the result of a fused norm, activation or gated
activation, the op computes it again in the backward pass from what it has saved anyway. Rules are matched in the
original graph of one module, and the input may come from another module. So every layer is rewritten unless its input
is known to be something else, such as the result of another layer; :func:`fused.recomputed_input` decides in each call.
Layers with few features are left alone: the computation takes too long for them (``recomputation_cost``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fused.attention import attention
from schedule.patterns import GraphMatch
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.patterns.ops import register_form
from schedule.rules import linear, recomputed_layers
from schedule.rules.batch_norm_folding import convolved
from schedule.rules.casts import Value, floating
from schedule.rules.recomputation_cost import costly_again
from schedule.rules.recomputed_layers import CONVOLUTIONS
from schedule.rules.rule import Build, Filter, Form, Proof, Rule, every_match
from schedule.rules.rule_registry import register_rule

FAMILY = "recomputed_input"

for _convolution in CONVOLUTIONS:
    register_form(_convolution.__name__, _convolution)

# -- checks -------------------------------------------------------------------------------------------------

_NOT_FUSED = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d"),
        *("embedding", "scaled_dot_product_attention", "cat", "stack", "pad"),
    )
)
"""Operations with results, or sums of results, that no fused op computes, apart from attention."""


def _input(graph_match: GraphMatch) -> OpNode | None:
    """Return the input of the layer, or None for a parameter."""
    return graph_match.normal.of.get(graph_match.inputs["x"])


def _may_be_fused(value: OpNode | None) -> bool:
    """Check whether a value, or the one that it is a view of, may be the result of a fused op."""
    source = None if value is None else value.source
    if source is None or source.op == "get_attr" or source.target is attention:
        return False
    parts = operands(source.args) if source.op == "add" else ()
    return _NOT_FUSED.isdisjoint(each.op for each in (source, *parts))


def _profitability(graph_match: GraphMatch) -> str:
    return costly_again(_input(graph_match), graph_match.normal)


def _about(is_layer: Filter) -> Filter:
    rewritten = (recomputed_layers.linear, *CONVOLUTIONS)

    def about(graph_match: GraphMatch) -> bool:
        if any(node.target in rewritten for node in graph_match.nodes) or not is_layer(graph_match):
            return False
        return _may_be_fused(_input(graph_match))

    return about


# -- the rules ----------------------------------------------------------------------------------------------


def _rule(name: str, patterns: tuple[Any, ...], build: Build, proof: Proof, is_layer: Filter = every_match) -> Rule:
    return register_rule(
        Rule(
            name=f"recomputed_{name}",
            family=FAMILY,
            patterns=patterns,
            build=build,
            proof=proof,
            summary="the same layer, saving x only if no fused op can compute it again",
            about=_about(is_layer),
            profitability=_profitability,
            rank=-1,  # other rules may take the bias, or all of it
            sets=("memory",),
        )
    )


def _linear_rule(name: str, patterns: tuple[Any, ...], *forms: Form) -> Rule:
    """Register the rule for linear layers with a bias, or that for those without, whose bias another rule may take."""
    return _rule(
        name,
        patterns,
        partial(linear.build, function=recomputed_layers.linear),
        Proof(
            forms,
            linear.inputs_of,
            shapes=((2, 5, 8), (3, 16)),
            refused=(
                lambda x, w, b: F.linear(torch.cat([x, x])[:1], w).tanh(),
                lambda x, w, b: torch.addmm(b, x.view(-1, x.shape[-1]), w, beta=2),
                lambda x, w, b: F.gelu(x) @ w.expand(2, -1, -1),
            ),
        ),
        linear.is_layer,
    )


RECOMPUTED_LINEAR_BIAS = _linear_rule(
    "linear_bias",
    linear.BIASED,
    lambda x, w, b: F.linear(F.layer_norm(x, x.shape[-1:], b), w, b),
    lambda x, w, b: torch.addmm(b, F.gelu(x).view(-1, x.shape[-1]), w).view(x.shape),
)
RECOMPUTED_LINEAR = _linear_rule("linear", linear.PLAIN, lambda x, w, b: F.silu(x) * b @ w)


def _convolution_rule(dims: int) -> Rule:
    """Register the rule for convolutions of ``dims`` dimensions."""
    layer, function = convolved(dims), (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def pattern(x: Value, weight: Value, bias: Value = None) -> Value:
        return layer(floating("x", 2), floating("weight", 2), bias)

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        settings = (scalars[name] for name in ("stride", "padding", "dilation", "groups"))
        args = (inputs["x"], inputs["weight"], inputs.get("bias"), *settings)
        return graph.call_function(CONVOLUTIONS[dims - 1], args)

    pattern.__name__ = function.__name__
    return _rule(
        function.__name__,
        (pattern,),
        build,
        Proof(
            _convolutions(function),
            _inputs,
            shapes=((2, 4, *(5, 6, 3)[:dims]), (1, 4, *(7, 4, 5)[:dims])),
            refused=(lambda x, w, b: function(torch.cat([x, x])[:1], w, b),),
        ),
    )


def _convolutions(function: Form) -> tuple[Form, ...]:
    return (
        lambda x, w, b: function(F.silu(F.group_norm(x, 2)), w, b, 2, padding=1),
        lambda x, w, b: function(F.relu(x), w[:, :2], b, dilation=2, padding=2, groups=2),
    )


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, the weight of a convolution with as many outputs as inputs, and a bias."""
    channels = shape[1]
    weight = torch.randn(channels, channels, *(3 for _ in shape[2:]), dtype=dtype) / 4
    return torch.randn(shape, dtype=dtype), weight, torch.randn(channels, dtype=dtype)


RECOMPUTED_CONVOLUTIONS = tuple(map(_convolution_rule, (1, 2, 3)))
