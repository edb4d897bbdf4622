"""Batch norms with the residual sum and the activation behind them.

::

    before:  n = self.norm(self.conv(x));  y = F.relu(n + residual)
    after:   y = fused.batch_norm(self.conv(x), self.norm.running_mean, …, activation='relu', residual=residual)

In training the running statistics are updated as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
from fused.torch_internals.torch_modules import BatchNormBase
from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, call_module, scalar
from schedule.patterns.language import call_function
from schedule.rules.activations import clipped_at_6, gelu_tanh, swish
from schedule.rules.casts import Value, floating
from schedule.rules.rule import DEFAULT, Form, Proof, Rule, spec_of
from schedule.rules.rule_registry import register_rule
from schedule.rules.thresholds import small

FAMILY = "batch_norm"
Way = Callable[[Value], Value]
ROWS = ("running_mean", "running_var", "weight", "bias")

# -- patterns -----------------------------------------------------------------------------------------------


def normed(x: Value, rows: tuple[Value, ...], counter: Value) -> Value:
    """Match a batch norm of x with these rows, in the order of ``ROWS``."""
    settings = (scalar("training"), scalar("momentum"), scalar("eps"))
    return call_function(fused.batch_norm)(x, *rows, *settings, num_batches_tracked=counter)


def _pattern(activation: Way | None, has_residual: bool) -> Callable[..., Value]:
    after: Way = activation or (lambda z: z)

    def pattern(
        x: Value,
        running_mean: Value = None,
        running_var: Value = None,
        weight: Value = None,
        bias: Value = None,
        counter: Value = None,
    ) -> Value:
        z = normed(floating("x", 2), (running_mean, running_var, weight, bias), counter)
        return after(z + floating("residual", 2) if has_residual else z)

    name = getattr(activation, "__name__", "")
    pattern.__name__ = f"{name}{' of ' if name else ''}batch norm{' and residual' if has_residual else ''}"
    return pattern


def _not_open(activation: Way) -> Callable[..., Value]:
    def called(x: Value) -> Value:
        return activation(call_module(BatchNormBase)(x))

    return called


# -- checks -------------------------------------------------------------------------------------------------


def _extra_check(graph_match: GraphMatch) -> str:
    scalars, x = graph_match.scalars, spec_of(graph_match.inputs["x"])
    if x is None:
        return "the input was not seen in the recorded run"
    if not isinstance(scalars.get("training"), bool):
        return "whether the statistics are those of the batch is decided while running"
    if not isinstance(scalars.get("eps"), (int, float)):
        return "eps is not a number"
    if not isinstance(scalars.get("momentum"), (int, float, type(None))):
        return "the momentum is computed while running"
    return about_rows(graph_match, x) or about_residual(graph_match, x)


def about_rows(graph_match: GraphMatch, x: TensorSpec) -> str:
    """Return the reason if a row of a match does not fit the norm's input, else ""."""
    for name in ROWS:
        given = graph_match.inputs.get(name)
        row = spec_of(given)
        if given is None:
            continue
        if row is None or row.ndim != 1 or row.device != x.device:
            return f"the {name} is not a vector on the device of the input"
        if row.dtype not in (x.dtype, torch.float32 if x.dtype.itemsize == 2 else x.dtype):
            return f"the {name} has another dtype than the input"
    return ""


def about_residual(graph_match: GraphMatch, x: TensorSpec) -> str:
    """Return the reason if the residual of a match does not fit the norm's result, else ""."""
    residual = spec_of(graph_match.inputs.get("residual"))
    if residual is None:
        return ""
    alike = residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device
    return "" if alike else "the added value has another shape, dtype or device than the input"


def _profitability(graph_match: GraphMatch) -> str:
    return small(FAMILY, spec_of(graph_match.inputs["x"]))


# -- the rules ----------------------------------------------------------------------------------------------


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, running mean and variance, weight, bias and residual."""
    channels = shape[1]
    mean, variance = torch.randn(channels, dtype=dtype), torch.rand(channels, dtype=dtype) + 0.5
    weight, bias = torch.randn(channels, dtype=dtype) + 1, torch.randn(channels, dtype=dtype)
    x, residual = torch.randn(shape, dtype=dtype) * 2, torch.randn(shape, dtype=dtype)
    return x, mean, variance, weight, bias, residual


SHAPES = ((2, 4, 5, 6), (3, 8, 7), (2, 4, 2, 3, 5), (5, 6))


def _forms(after: Callable[[Tensor], Tensor], added: bool) -> tuple[Form, ...]:
    def result(z: Tensor, residual: Tensor) -> Tensor:
        return after(z + residual if added else z)

    return (
        lambda x, m, v, w, b, r: result(F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5), r),
        lambda x, m, v, w, b, r: result(F.batch_norm(x, m.detach(), v.detach(), w, b, eps=1e-3), r),
        lambda x, m, v, w, b, r: result(F.batch_norm(x, m.detach(), v.detach()), r),
    )


def _refused(after: Callable[[Tensor], Tensor]) -> tuple[Form, ...]:
    def used_twice(x: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        normed = F.batch_norm(x, m.detach(), v.detach(), w, b)
        return after(normed + r) + normed

    return (
        used_twice,
        lambda x, m, v, w, b, r: after(F.instance_norm(x, None, None, w, b) + r),
        lambda x, m, v, w, b, r: F.leaky_relu(F.batch_norm(x, m.detach(), v.detach(), w, b)),
    )


def options(inputs: dict[str, Any], activation: str | None) -> dict[str, Any]:
    """Return the keyword arguments of the replacement."""
    given = {"num_batches_tracked": inputs.get("counter"), "activation": activation, "residual": inputs.get("residual")}
    return {key: value for key, value in given.items() if value is not None}


def _rule(
    name: str, activation: str | None, ways: tuple[Way | None, ...], forms: tuple[Callable[[Tensor], Tensor], ...]
) -> Rule:
    """Register the rule of one activation, or of the residual sum alone."""

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        rows = (inputs.get(row) for row in ROWS)
        args = (inputs["x"], *rows, scalars["training"], scalars["momentum"], scalars["eps"])
        return graph.call_function(fused.batch_norm, args, options(inputs, activation))

    residuals = (True,) if activation is None else (True, False)
    return register_rule(
        Rule(
            name=name,
            family=FAMILY,
            patterns=tuple(_pattern(way, has_residual) for has_residual in residuals for way in ways),
            build=build,
            proof=Proof(
                forms=tuple(form for each in forms for added in residuals for form in _forms(each, added)),
                inputs=inputs_of,
                shapes=SHAPES,
                refused=_refused(forms[0]),
            ),
            summary="fused.batch_norm(x, mean, var, weight, bias, …)",
            extra_check=_extra_check,
            profitability=_profitability,
            bystanders=tuple((_not_open(way), _STAYS) for way in ways if way is not None),
            sets=DEFAULT,
        )
    )


_STAYS = (
    "the batch norm stays a call: it is frozen, synchronized or of another class, has a hook, or its caller branches on"
    " data, and would update the statistics twice if it started again"
)


def same(z: Tensor) -> Tensor:
    """Return z: no activation."""
    return z


BATCH_NORM_RELU = _rule("batch_norm_relu", "relu", (F.relu,), (F.relu, nn.ReLU(), lambda z: F.relu(z, inplace=True)))
BATCH_NORM_RELU6 = _rule("batch_norm_relu6", "relu6", (clipped_at_6, F.relu6), (F.relu6, nn.ReLU6()))
BATCH_NORM_HARD_SWISH = _rule("batch_norm_hard_swish", "hard_swish", (F.hardswish,), (F.hardswish, nn.Hardswish()))
BATCH_NORM_SILU = _rule("batch_norm_silu", "silu", (F.silu, swish), (F.silu, lambda z: z * torch.sigmoid(z)))
BATCH_NORM_GELU = _rule("batch_norm_gelu", "gelu", (F.gelu,), (F.gelu,))
BATCH_NORM_GELU_TANH = _rule(
    "batch_norm_gelu_tanh", "gelu_tanh", (gelu_tanh,), (lambda z: F.gelu(z, approximate="tanh"),)
)
BATCH_NORM_ADD = _rule("batch_norm_add", None, (None,), (same,))
