"""Inputs of attention in the form of torch's own attention: filled scores and repeated heads.

Masked scores that are filled (``masked_fill``, ``where``) may be filled by addition if the number swallows every
score: ``-inf``, or about the lowest number of the dtype. Keys and values repeated for groups of queries are passed
without the repetition, with ``enable_gqa=True`` and the sizes of the repetition, which the op compares with those of
its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from schedule.capture import TensorSpec
from schedule.patterns import any_of, optional, scalar, tensor
from schedule.patterns.language import call_function
from schedule.rules.casts import Value

FILLS = ("filled", "filled_last")
"""Names of the steps that may fill scores: before masks are added, and after."""


# -- filled scores ------------------------------------------------------------------------------------------


def filled(name: str) -> Callable[[Value], Value]:
    """Build an optional pattern step filling the masked scores with one number, or a tensor made of it."""

    def fill(scores: Value) -> Value:
        hidden, allowed = tensor(f"{name}_hidden", dtype=torch.bool), tensor(f"{name}_kept", dtype=torch.bool)
        number = scalar(f"{name}_number")
        options = {option: scalar(f"{name}_{option}") for option in ("dtype", "device")}
        full = call_function(torch.full)(scalar(f"{name}_size"), number, **options)
        value = any_of(number, full, call_function(torch.tensor)(number, **options), name=f"{name}_value")
        ways = (scores.masked_fill(hidden, value), torch.where(allowed, scores, value))
        return any_of(*ways, torch.where(hidden, value, scores), name=f"{name}_way")

    return optional(fill, name=name)


def where_filled(inputs: Mapping[str, Any], name: str) -> Any:
    """Return the boolean tensor selecting the scores to fill or to keep, or None if scores are not filled."""
    hidden = inputs.get(f"{name}_hidden")
    return inputs.get(f"{name}_kept") if hidden is None else hidden


def is_swallowing(scalars: Mapping[str, Any], name: str, dtype: torch.dtype) -> bool:
    """Check whether every score of ``dtype`` plus the fill number equals the fill number."""
    number = fill_number(scalars, name, dtype)
    return number is not None and number <= torch.finfo(dtype).min / 2


def fill_number(scalars: Mapping[str, Any], name: str, dtype: torch.dtype) -> float | None:
    """Return the fill number as scores of ``dtype`` hold it, or None if they would be filled with anything else."""
    number, size = scalars.get(f"{name}_number"), scalars.get(f"{name}_size")
    made = scalars.get(f"{name}_dtype") or dtype
    if type(number) not in (int, float) or not isinstance(made, torch.dtype) or not made.is_floating_point:
        return None
    if size is not None and not (isinstance(size, (tuple, list)) and len(size) == 0):
        return None  # more than one element, or a dtype to promote the scores to
    return float(torch.tensor(number, dtype=made).to(dtype))


def filling(
    graph: fx.Graph, inputs: Mapping[str, Any], scalars: Mapping[str, Any], name: str, dtype: torch.dtype
) -> tuple[fx.Node, float | None] | None:
    """Return the boolean mask of the filled scores of ``dtype`` and the number, or None if scores are not filled."""
    if where_filled(inputs, name) is None:
        return None
    hidden = inputs.get(f"{name}_hidden")
    if hidden is None:
        hidden = graph.call_function(torch.logical_not, (inputs[f"{name}_kept"],))
    return hidden, fill_number(scalars, name, dtype)


# -- repeated heads -----------------------------------------------------------------------------------------


def repeated(name: str) -> Callable[[Value], Value]:
    """Build an optional pattern step repeating each head of ``[batch, heads, tokens, features]`` for its queries."""

    def repeat(x: Value) -> Value:
        apart = any_of(x[:, :, None], x[:, :, None, :, :], x[:, :, None, ...], x.unsqueeze(2), name=f"{name}_apart")
        sizes, shape = scalar(f"{name}_sizes"), scalar(f"{name}_shape")
        wide = any_of(apart.expand(sizes), apart.broadcast_to(sizes), name=f"{name}_wide")
        merged = (wide.flatten(1, 2), wide.reshape(shape), wide.view(shape))
        return any_of(*merged, x.repeat_interleave(scalar(f"{name}_repeats"), dim=1), name=f"{name}_merged")

    return optional(repeat, name=f"{name}_repeated")


def repetition(scalars: Mapping[str, Any], name: str) -> tuple[Any, Any] | None:
    """Return the sizes that keys or values are expanded to and their shape afterwards, or None if not repeated."""
    repeats, sizes = scalars.get(f"{name}_repeats"), scalars.get(f"{name}_sizes")
    if repeats is not None:
        return (-1, -1, repeats, -1, -1), None
    return None if sizes is None else (sizes, scalars.get(f"{name}_shape"))


def leading_sizes(x: TensorSpec, q: TensorSpec, scalars: Mapping[str, Any], name: str) -> Sequence[int]:
    """Return the recorded batch and heads of keys or values, as many heads as queries have if they are repeated."""
    if repetition(scalars, name) is None or not x.ndim == q.ndim == 4 or q.shape[1] % x.shape[1]:
        return x.shape[:-2]
    return x.shape[0], q.shape[1]
