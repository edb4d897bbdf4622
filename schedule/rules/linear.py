"""Linear layers by the machine's faster library for matrix products.

::

    before:  y = F.linear(x, self.fc.weight, self.fc.bias);      z = x @ self.w + self.bias
    after:   y = fused.linear(x, self.fc.weight, self.fc.bias);  z = fused.linear(x, self.w.t(), self.bias)

They apply in float32 on CPUs where torch's own library is the slower one. A bias that another rule takes, such as the
one before a GELU, stays with that rule. Where torch's products are as fast, the sets of rules leave these two out
(``fused.backends()["linear"]`` says why); requested by name, they are applied anyway and change nothing there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from fused.backends import onednn
from fused.linear import LEAST_PRODUCTS
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, tensor
from schedule.patterns.ops import register_form
from schedule.rules import recomputed_layers
from schedule.rules.casts import Value, floating
from schedule.rules.rule import Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule

FAMILY = "linear"

_REWRITTEN = (fused.linear, recomputed_layers.linear)
for _function in _REWRITTEN:
    register_form("linear", _function)  # rules and patterns for products treat it as one

# -- patterns -----------------------------------------------------------------------------------------------

# A "weight" is [out, in], as nn.Linear has it; a "matrix" is [in, out], as transformers' Conv1D has it.


def _product(x: Value, weight: Value) -> Value:
    return F.linear(floating("x"), tensor("weight", ndim=2))


def _matrix_product(x: Value, matrix: Value) -> Value:
    return torch.matmul(floating("x"), tensor("matrix", ndim=2))


def _product_and_bias(x: Value, weight: Value, bias: Value) -> Value:
    return _product(x, weight) + tensor("bias", ndim=1)


def _matrix_product_and_bias(x: Value, matrix: Value, bias: Value) -> Value:
    return _matrix_product(x, matrix) + tensor("bias", ndim=1)


def _addmm(x: Value, matrix: Value, bias: Value) -> Value:
    return torch.addmm(tensor("bias", ndim=1), floating("x"), tensor("matrix", ndim=2))


PLAIN = (_product, _matrix_product)
BIASED = (_product_and_bias, _matrix_product_and_bias, _addmm)

# -- checks -------------------------------------------------------------------------------------------------


def _specs(graph_match: GraphMatch) -> tuple[TensorSpec | None, TensorSpec | None]:
    """Return the specs of x and of the weight, the latter as ``[out, in]``."""
    inputs = graph_match.inputs
    matrix = spec_of(inputs.get("matrix"))
    turned = None if matrix is None else replace(matrix, shape=matrix.shape[::-1])
    return spec_of(inputs["x"]), turned or spec_of(inputs.get("weight"))


def is_layer(graph_match: GraphMatch) -> bool:
    """Check for a product of fitting shapes, with nothing added except a bias."""
    x, weight = _specs(graph_match)
    if x is None or weight is None or x.shape[-1:] != weight.shape[1:]:
        return False
    bias = spec_of(graph_match.inputs.get("bias"))
    return graph_match.inputs.get("bias") is None or (bias is not None and bias.shape == weight.shape[:1])


def _is_about(graph_match: GraphMatch) -> bool:
    """Check for a float32 layer on the CPU, not rewritten yet."""
    if not is_layer(graph_match) or any(node.target in _REWRITTEN for node in graph_match.nodes):
        return False
    return all(spec and spec.dtype == torch.float32 and spec.device.type == "cpu" for spec in _specs(graph_match))


def _profitability(graph_match: GraphMatch) -> str:
    x, weight = _specs(graph_match)
    if x is None or weight is None:
        return ""
    products = math.prod(x.shape[:-1]) * math.prod(weight.shape)
    if products >= LEAST_PRODUCTS:
        return ""
    return (
        f"too small: {products:,} multiplications, profitable from {LEAST_PRODUCTS:,} "
        "(give example inputs of the size you run at, or cost_guard=False)"
    )


# -- the rules ----------------------------------------------------------------------------------------------


def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any], function: Any = fused.linear) -> fx.Node:
    """Insert a call of ``function`` for a match of one of the patterns."""
    weight, matrix, bias = (inputs.get(name) for name in ("weight", "matrix", "bias"))
    if weight is None:
        weight = graph.call_method("t", (matrix,))
    return graph.call_function(function, (inputs["x"], weight, *([] if bias is None else [bias])))


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, a weight of the width of ``shape``, and a bias."""
    width = shape[-1]
    weight = torch.randn(width, width, dtype=dtype) * width**-0.5
    return torch.randn(shape, dtype=dtype), weight, torch.randn(width, dtype=dtype)


_SHAPES = ((2, 5, 8), (3, 16), (1, 1, 4), (2, 3, 2, 6))


def _rule(name: str, patterns: tuple[Any, ...], proof: Proof, summary: str) -> Rule:
    return register_rule(
        Rule(
            name=name,
            family=FAMILY,
            patterns=patterns,
            build=build,
            proof=proof,
            summary=summary,
            about=_is_about,
            profitability=_profitability,
            rank=-2,  # after all rules that may take the bias or the product, also those that compute x again
            sets=("default",),
            no_gain_here=onednn.why_not,
        )
    )


LINEAR_BIAS = _rule(
    "linear_bias",
    BIASED,
    Proof(
        (
            lambda x, w, b: F.linear(x, w, b),
            lambda x, w, b: F.linear(x, w) + b,
            lambda x, w, b: x @ w + b,
            lambda x, w, b: b + torch.matmul(x, w),
            lambda x, w, b: torch.addmm(b, x.view(-1, x.shape[-1]), w).view(x.shape),
        ),
        inputs_of,
        _SHAPES,
        dtypes=(torch.float32,),
        refused=(
            lambda x, w, b: torch.addmm(b, x.view(-1, x.shape[-1]), w, alpha=2),
            lambda x, w, b: F.linear(x, w) - b,
        ),
    ),
    "fused.linear(x, weight, bias)",
)
LINEAR = _rule(
    "linear",
    PLAIN,
    Proof(
        (lambda x, w, b: F.linear(x, w) * b, lambda x, w, b: (x @ w).tanh() - b),
        inputs_of,
        _SHAPES,
        dtypes=(torch.float32,),
        refused=(lambda x, w, b: x * b @ w.expand(2, -1, -1),),
    ),
    "fused.linear(x, weight)",
)
