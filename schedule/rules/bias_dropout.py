"""Bias, dropout and the residual sum after a projection, in one pass.

::

    before:  y = residual + F.dropout(F.linear(x, self.out.weight, self.out.bias), 0.1, training=True)
    after:   y = fused.bias_dropout_add(F.linear(x, self.out.weight), self.out.bias, residual, 0.1)

Dropout must be active, so the rules apply in training only. A residual sum in the enclosing module stays where it is:
``fused.bias_dropout`` then does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fused
from schedule.patterns import GraphMatch, scalar
from schedule.rules.casts import Dtypes, Value, floating
from schedule.rules.rule import DEFAULT, Proof, Rule
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "bias_dropout"

# -- patterns -----------------------------------------------------------------------------------------------


def _dropped(z: Value) -> Value:
    return F.dropout(z, p=scalar("p"), training=scalar("training"))


def bias_dropout_add(x: Value, bias: Value, residual: Value) -> Value:
    return floating("residual") + _dropped(floating("x", 2) + floating("bias"))


def dropout_add(x: Value, residual: Value) -> Value:
    return floating("residual") + _dropped(floating("x"))


def bias_dropout(x: Value, bias: Value) -> Value:
    return _dropped(floating("x", 2) + floating("bias"))


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    dtypes = Dtypes.of(graph_match)
    if dtypes.spec("x") is None:
        return "the input was not seen in the recorded run"
    if not isinstance(graph_match.scalars["p"], (int, float)):
        return "the dropout probability is computed while running"
    return _mismatch(dtypes)


def _no_gain(graph_match: GraphMatch) -> str:
    dtypes, scalars = Dtypes.of(graph_match), graph_match.scalars
    if scalars["training"] is not True or scalars["p"] in (0, 0.0):
        return "nothing is dropped"
    return _mismatch(dtypes)


def _mismatch(dtypes: Dtypes) -> str:
    x, bias, residual = dtypes.spec("x"), dtypes.spec("bias"), dtypes.spec("residual")
    if x is not None and bias is not None and (bias.shape != x.shape[-1:] or bias.device != x.device):
        return f"the added value is not a bias of {x.shape[-1]} features"
    if x is not None and residual is not None and (x.shape != residual.shape or x.device != residual.device):
        return "the added value is not a residual: its shape differs from that of the dropped value"
    return ""


def _profitability(kind: str) -> Callable[[GraphMatch], str]:
    return lambda graph_match: small(kind, Dtypes.of(graph_match).spec("x"))


# -- the rules ----------------------------------------------------------------------------------------------


def _rate(scalars: dict[str, Any]) -> tuple[Any, ...]:
    """Return the probability, and the training flag if it is not True.

    Only matches fused by hand can be in evaluation mode; nothing is dropped there.
    """
    return (scalars["p"],) if scalars["training"] is True else (scalars["p"], scalars["training"])


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    return graph.call_function(fused.bias_dropout, (inputs["x"], inputs["bias"], *_rate(scalars)))


def _build_add(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    args = (inputs["x"], inputs.get("bias"), inputs["residual"], *_rate(scalars))
    return graph.call_function(fused.bias_dropout_add, args)


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, a bias and a residual."""
    x, residual = torch.randn(shape, dtype=dtype) * 2, torch.randn(shape, dtype=dtype)
    return x, torch.randn(shape[-1:], dtype=dtype), residual


_SHAPES = ((2, 5, 8), (7, 16), (2, 3, 2, 6))


def _used_twice(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    dropped = F.dropout(x + bias, 0.1)
    return residual + dropped + dropped


BIAS_DROPOUT_ADD = register_rule(
    Rule(
        name="bias_dropout_add",
        family=FAMILY,
        patterns=(bias_dropout_add, dropout_add),
        build=_build_add,
        proof=Proof(
            (
                lambda x, bias, residual: residual + F.dropout(x + bias, 0.1, training=True),
                lambda x, bias, residual: torch.nn.Dropout(0.3)(x + bias) + residual,
                lambda x, bias, residual: residual + F.dropout(x, p=0.2, inplace=False),
            ),
            _inputs,
            _SHAPES,
            refused=(
                _used_twice,
                lambda x, bias, residual: residual + F.dropout(x + bias, 0.1, training=False),
                lambda x, bias, residual: residual - F.dropout(x + bias, 0.1),
                lambda x, bias, residual: residual + F.alpha_dropout(x + bias, 0.1, training=True),
                lambda x, bias, residual: residual[..., :1] + F.dropout(x + bias, 0.1),
            ),
        ),
        summary="fused.bias_dropout_add(x, bias, residual, p)",
        extra_check=_extra_check,
        no_gain=_no_gain,
        profitability=_profitability("dropout, sum"),
        rank=1,  # before the rules for a sum with the norm after it: each of the two is then one pass
        sets=DEFAULT,
    )
)
BIAS_DROPOUT = register_rule(
    Rule(
        name="bias_dropout",
        family=FAMILY,
        patterns=(bias_dropout,),
        build=_build,
        proof=Proof(
            (
                lambda x, bias: F.dropout(x + bias, 0.1, training=True),
                lambda x, bias: torch.nn.Dropout(0.3)(x + bias),
            ),
            _inputs,
            _SHAPES,
            refused=(
                lambda x, bias: F.dropout(x + bias, 0.1, training=False),
                lambda x, bias, residual: F.dropout(x + residual, 0.1),
            ),
        ),
        summary="fused.bias_dropout(x, bias, p)",
        extra_check=_extra_check,
        no_gain=_no_gain,
        profitability=_profitability("dropout"),
        sets=DEFAULT,
    )
)
