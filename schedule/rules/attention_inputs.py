"""Inputs of attention in the form of torch's own attention: filled scores and repeated heads.

Masked scores that are filled (``masked_fill``, ``where``) may be filled by addition if the number swallows every
score: ``-inf``, or about the lowest number of the dtype. Keys and values repeated for groups of queries are passed
without the repetition, with ``enable_gqa=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from schedule.patterns import any_of, optional, scalar, tensor
from schedule.patterns.ops import find_form
from schedule.rules.casts import Value
from schedule.rules.rule import spec_of

FILLS = ("filled", "filled_last")
"""Names of the steps that may fill scores: before masks are added, and after."""


# -- filled scores ------------------------------------------------------------------------------------------


def filled(name: str) -> Callable[[Value], Value]:
    """Build an optional pattern step filling the masked scores with one number."""

    def fill(scores: Value) -> Value:
        hidden, allowed = tensor(f"{name}_hidden", dtype=torch.bool), tensor(f"{name}_kept", dtype=torch.bool)
        number = scalar(f"{name}_number")
        ways = (
            scores.masked_fill(hidden, number),
            torch.where(allowed, scores, number),
            torch.where(allowed, scores, tensor(f"{name}_tensor")),
            torch.where(hidden, number, scores),
        )
        return any_of(*ways, name=f"{name}_way")

    return optional(fill, name=name)


def where_filled(inputs: Mapping[str, Any], name: str) -> Any:
    """Return the boolean tensor selecting the scores to fill or to keep, or None if scores are not filled."""
    hidden = inputs.get(f"{name}_hidden")
    return inputs.get(f"{name}_kept") if hidden is None else hidden


def is_swallowing(inputs: Mapping[str, Any], scalars: Mapping[str, Any], name: str, dtype: torch.dtype) -> bool:
    """Check whether every score plus the fill number equals the fill number."""
    number = _number(inputs, scalars, name)
    return isinstance(number, (int, float)) and number <= torch.finfo(dtype).min / 2


def _number(inputs: Mapping[str, Any], scalars: Mapping[str, Any], name: str) -> Any:
    """Return the fill number, also if it is first made a tensor of one element."""
    node = inputs.get(f"{name}_tensor")
    if node is None:
        return scalars.get(f"{name}_number")
    if not isinstance(node, fx.Node) or node.target not in (torch.tensor, torch.full):
        return None
    return node.args[node.target is torch.full]


def filling(
    graph: fx.Graph, inputs: Mapping[str, Any], scalars: Mapping[str, Any], name: str
) -> tuple[fx.Node, float] | None:
    """Return the boolean mask of the filled scores and the fill number, or None if scores are not filled."""
    if where_filled(inputs, name) is None:
        return None
    hidden = inputs.get(f"{name}_hidden")
    if hidden is None:
        hidden = graph.call_function(torch.logical_not, (inputs[f"{name}_kept"],))
    return hidden, _number(inputs, scalars, name)


# -- repeated heads -----------------------------------------------------------------------------------------


def before_repeating(k: Any, v: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return keys and values before the heads of ``[batch, heads, tokens, features]`` were repeated, or None."""
    found = _unrepeated(k), _unrepeated(v)
    specs = [spec_of(each) for each in found]
    if found[0] is None or found[1] is None or specs[0] is None or specs[1] is None:
        return None
    return (found[0], found[1]) if specs[0].shape[1] == specs[1].shape[1] else None


def _unrepeated(value: Any) -> fx.Node | None:
    name, source = _step(value)
    if name == "repeat_interleave":
        dim = value.kwargs.get("dim", value.args[2] if len(value.args) > 2 else None)
        return source if dim in (1, -3) and _is_repeat(source, value) else None
    if name not in ("reshape", "view", "flatten"):
        return None
    name, widened = _step(source)
    if name not in ("expand", "broadcast_to"):
        return None
    name, given = _step(widened)
    new_dim = widened.args[1] if widened is not None and len(widened.args) > 1 else None
    between = (name == "unsqueeze" and new_dim == 2) or (name == "getitem" and _is_between(new_dim))
    return given if between and _is_repeat(given, value) else None


def _step(value: Any) -> tuple[str, Any]:
    """Return the name of the operation computing ``value``, and its first operand."""
    if not isinstance(value, fx.Node) or value.op not in ("call_function", "call_method") or not value.args:
        return "", None
    form = find_form(value.op, value.target)
    return (form.definition.name if form is not None else ""), value.args[0]


def _is_between(index: Any) -> bool:
    """Check whether an index is ``[:, :, None]``, with or without the dimensions after it."""
    if not isinstance(index, tuple) or len(index) < 3 or index[2] is not None:
        return False
    return all(each in (slice(None), Ellipsis) for each in (*index[:2], *index[3:])) and Ellipsis not in index[:2]


def _is_repeat(given: Any, repeated: Any) -> bool:
    """Check whether ``repeated`` has several times the heads of ``given``, and the same other dimensions."""
    one, many = spec_of(given), spec_of(repeated)
    if one is None or many is None or one.ndim != 4 or many.ndim != 4:
        return False
    allowed = (one.shape[0], *one.shape[2:]) == (many.shape[0], *many.shape[2:])
    return allowed and many.shape[1] > one.shape[1] and many.shape[1] % one.shape[1] == 0
