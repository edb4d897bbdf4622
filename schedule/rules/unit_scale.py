"""Residual sums multiplied or divided by one, without this pass over memory.

::

    before:  y = (x + self.conv(h)) / 1.0
    after:   y = x + self.conv(h)

Blocks of diffusers divide by ``output_scale_factor`` and ``rescale_output_factor``, which are one in most models.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from schedule.patterns import GraphMatch, scalar
from schedule.rules.casts import Value, floating
from schedule.rules.rule import DEFAULT, Form, Proof, Rule
from schedule.rules.rule_registry import register_rule

FAMILY = "unit_scale"


def _one() -> Any:
    return scalar("one", where=lambda value: type(value) in (int, float) and value == 1)


def divided_sum(x: Value, h: Value) -> tuple[Value, Value]:
    summed = floating("x", 0) + floating("h", 0)
    return summed / _one(), summed


def multiplied_sum(x: Value, h: Value) -> tuple[Value, Value]:
    summed = floating("x", 0) + floating("h", 0)
    return summed * _one(), summed


def divided_summand(x: Value, h: Value) -> Value:
    return floating("x", 0) + floating("h", 0) / _one()


def multiplied_summand(x: Value, h: Value) -> Value:
    return floating("x", 0) + floating("h", 0) * _one()


def _extra_check(graph_match: GraphMatch) -> str:
    """Return the reason if the sum itself is used for more than its shape: both would be one tensor."""
    users = {user for output in graph_match.outputs[1:] for user in output.users}.difference(graph_match.nodes)
    only_shape = all(user.target is getattr and user.args[1] == "shape" for user in users)
    return "" if only_shape else "the sum is used without the scale, too"


def _build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> list[fx.Node]:
    return [graph.call_function(operator.add, (inputs["x"], inputs["h"]))] * 2


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(shape, dtype=dtype), torch.randn(shape[-1:], dtype=dtype)


FORMS: tuple[Form, ...] = (
    lambda x, h: (x + h) / 1.0,
    lambda x, h: (h + x) * 1,
    lambda x, h: x / 1.0 + h,
    lambda x, h: h + 1.0 * x,
    lambda x, h: x.add(h).div(1),
)
UNIT_SCALE = register_rule(
    Rule(
        name="unit_scale",
        family=FAMILY,
        patterns=(divided_sum, multiplied_sum, divided_summand, multiplied_summand),
        build=_build,
        extra_check=_extra_check,
        proof=Proof(
            FORMS,
            _inputs,
            shapes=((2, 5, 8), (3, 4), (2, 3, 4, 5)),
            refused=(
                lambda x, h: (x + h) / 2.0,
                lambda x, h: (x - h) / 1.0,
                lambda x, h: 1.0 / (x + h),
                lambda x, h: x + h,
                lambda x, h: (x + h) // 1.0,
            ),
        ),
        summary="x + h",
        rank=-2,  # after the rules for a sum with what is behind it
        sets=DEFAULT,
    )
)
