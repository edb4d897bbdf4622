"""Products of attention written as ``einsum``, with queries, keys, values and result in any order of dimensions.

::

    before:  weights = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1)
             return torch.einsum("bhij,bjhd->bihd", weights, v)
    after:   return attention(q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)

The scores are ``[..., queries, keys]`` in either case, since the softmax is over the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from schedule.capture.recording.specs import TensorSpec
from schedule.patterns import any_of, scalar
from schedule.rules.casts import Value

SCORES, ATTENDED = "scores_equation", "attended_equation"
"""Names of the equations of the two products."""

Order = tuple[int, ...]


def scores_of(q: Value, k: Value) -> Value:
    """Match the product of queries and keys."""
    product = torch.matmul(q, any_of(k.transpose(-1, -2), k.transpose(-2, -1)))
    return any_of(product, torch.einsum(scalar(SCORES), q, k), name="scores")


def attended(weights: Value, v: Value) -> Value:
    """Match the product of weights and values."""
    return any_of(torch.matmul(weights, v), torch.einsum(scalar(ATTENDED), weights, v), name="attended")


def orders(scalars: Mapping[str, Any]) -> dict[str, Order] | None:
    """Return how to permute ``q``, ``k``, ``v`` and the ``result`` of a match, or None for equations that do not fit.

    Those of products that are no ``einsum`` are missing.
    """
    found: dict[str, Order] = {}
    if scalars.get(SCORES) is not None:
        q, k, scores = _terms(scalars[SCORES])
        *batch, query, key = scores or "??"
        features = (set(q) & set(k)) - set(scores)
        if len(features) != 1 or not _are(q, k, scores):
            return None
        found["q"], found["k"] = (_order(term, (*batch, one, *features)) for term, one in ((q, query), (k, key)))
    if scalars.get(ATTENDED) is not None:
        weights, v, result = _terms(scalars[ATTENDED])
        *batch, query, key = weights or "??"
        features = set(v) - set(weights)
        if len(features) != 1 or not _are(weights, v, result):
            return None
        found["v"] = _order(v, (*batch, key, *features))
        found["result"] = _order((*batch, query, *features), tuple(result))
    return None if () in found.values() else found


def _terms(equation: Any) -> tuple[str, str, str]:
    """Return the dimensions of both operands and of the result, or nothing of an equation with other parts."""
    operands, _, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    first, _, second = operands.partition(",")
    return (first, second, result) if all(map(str.isalpha, (first, second, result))) else ("", "", "")


def _are(*terms: str) -> bool:
    """Check that no dimension is named twice in a term, and that there are four in each or three."""
    return len({len(term) for term in terms}) == 1 and all(len(set(term)) == len(term) > 2 for term in terms)


def _order(given: Any, wanted: tuple[str, ...]) -> Order:
    """Return how to permute dimensions, or () if they are not the wanted ones."""
    return tuple(map(given.index, wanted)) if set(given) == set(wanted) else ()


def is_permuted(order: Order | None) -> bool:
    """Check whether an order is not the given one."""
    return order is not None and order != tuple(range(len(order)))


def inverse(order: Order) -> Order:
    """Return the order that undoes another."""
    return tuple(map(order.index, range(len(order))))


def permuted_spec(spec: TensorSpec | None, order: Order | None) -> TensorSpec | None:
    """Return the spec of a permuted tensor, or None if it has not as many dimensions."""
    if spec is None or order is None:
        return spec
    if len(order) != spec.ndim:
        return None
    return dataclasses.replace(spec, shape=tuple(spec.shape[dim] for dim in order))


def permuted_node(graph: fx.Graph, x: Any, order: Order | None) -> Any:
    """Insert ``x.permute(order)`` where that changes anything."""
    return graph.call_method("permute", (x, order)) if is_permuted(order) else x
