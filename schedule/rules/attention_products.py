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

from schedule.capture import TensorSpec
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
        q, k, (*batch, query, key) = _terms(scalars[SCORES])
        features = (set(q) & set(k)).difference(batch, query, key)
        found["q"], found["k"] = _order(q, (*batch, query, *features)), _order(k, (*batch, key, *features))
    if scalars.get(ATTENDED) is not None:
        (*batch, query, key), v, result = _terms(scalars[ATTENDED])
        features = set(v).difference(batch, query, key)
        found["v"] = _order(v, (*batch, key, *features))
        found["result"] = _order((*batch, query, *features), result)
    return None if () in found.values() else found


def _terms(equation: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the names of the dimensions of both operands and of the result, or none that fit for other equations."""
    operands, _, result = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    first, _, second = operands.partition(",")
    terms = tuple(first), tuple(second), tuple(result)
    named = all(len(set(term)) == len(term) == len(result) > 2 and all(map(str.isalpha, term)) for term in terms)
    return terms if named else (("", ""), ("", ""), ("", ""))


def _order(given: tuple[str, ...], wanted: tuple[str, ...]) -> Order:
    """Return how to permute named dimensions, or () if they are not the wanted ones."""
    return tuple(map(given.index, wanted)) if sorted(given) == sorted(wanted) and len(set(given)) == len(given) else ()


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
