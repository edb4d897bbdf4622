"""Shared dtype helpers of rules: casts in patterns, and the dtypes a construct computes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, any_of, optional, scalar, tensor
from schedule.rules.rule import spec_of
from schedule.util.errors import MatchError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Value = Any  # a tensor or, while a pattern is recorded, its proxy


def cast(name: str, origin: Value = None) -> Callable[[Value], Value]:
    """Build a pattern step for an optional cast.

    ``s.float()``, ``s.to(dtype)``, ``s.type_as(other)``; the other may be ``origin``, a value of the pattern itself.
    """
    return optional(must_cast(name, origin), name=name)


def must_cast(name: str, origin: Value = None) -> Callable[[Value], Value]:
    """Build a pattern step for a required cast, as in :func:`cast`."""

    def to(s: Value) -> Value:
        ways = [s.to(scalar(name, where=_is_float)), s.type_as(tensor(f"{name}_like"))]
        return any_of(*ways, *([] if origin is None else [s.type_as(origin)]), name=f"{name}_form")

    return to


def _is_float(dtype: Any) -> bool:
    return dtype in FLOATS if isinstance(dtype, torch.dtype) else False


def floating(name: str, least_ndim: int = 1) -> Value:
    """Declare a floating-point input of at least ``least_ndim`` dimensions in a pattern."""
    return tensor(name, where=lambda spec: spec.ndim >= least_ndim and spec.dtype in FLOATS)


class Dtypes:
    """Dtypes of a match, or of the arguments of a rule's ``build``.

    Args:
        inputs: as in :class:`GraphMatch`.
        scalars: as in :class:`GraphMatch`; they contain the dtypes of casts.
    """

    def __init__(self, inputs: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        self.inputs, self.scalars = inputs, scalars

    @classmethod
    def of(cls, graph_match: GraphMatch) -> Dtypes:
        """Return the dtypes of ``graph_match``."""
        return cls(graph_match.inputs, graph_match.scalars)

    def spec(self, name: str) -> TensorSpec | None:
        """Return the recorded spec of an input, or None if there is no such input or it was not seen."""
        return spec_of(self.inputs.get(name))

    def seen(self, name: str) -> TensorSpec:
        """Return the recorded spec of a required input, as :meth:`spec`.

        Raises:
            MatchError: there is no such input, or it was not seen in the recorded run.
        """
        spec = self.spec(name)
        if spec is None:
            raise MatchError(
                f"nobody knows the dtype of the input {name}", fix="rewrite what was found in a recorded run"
            )
        return spec

    def cast(self, name: str) -> torch.dtype | None:
        """Return the target dtype of the cast ``name``, or None if there is no such cast."""
        like = self.spec(f"{name}_like")
        dtype: torch.dtype | None = like.dtype if like is not None else self.scalars.get(name)
        return dtype

    def after(self, dtype: torch.dtype, name: str) -> torch.dtype:
        """Return ``dtype`` after the cast ``name``, if there is one."""
        return self.cast(name) or dtype

    def joined(self, dtype: torch.dtype, *names: str) -> torch.dtype:
        """Return the result dtype of arithmetic between ``dtype`` and the inputs ``names``."""
        for name in names:
            spec = self.spec(name)
            dtype = torch.promote_types(dtype, spec.dtype) if spec is not None and spec.ndim else dtype
        return dtype

    def narrowed(self, dtype: torch.dtype, *names: str) -> torch.dtype | None:
        """Return the first target dtype of the casts ``names`` too narrow for ``dtype``, or None."""
        found = [self.cast(name) for name in names]
        return next((to for to in found if to is not None and torch.promote_types(dtype, to) != to), None)


def with_dtype(
    graph: fx.Graph, x: Any, wanted: torch.dtype, given: torch.dtype, make: Callable[[Any], fx.Node]
) -> fx.Node:
    """Build ``make(x)`` with the result dtype ``wanted`` instead of ``given``.

    Either x is widened before, or the result is narrowed after.
    """
    if wanted == given:
        return make(x)
    if torch.promote_types(wanted, given) == given:
        return cast_node(graph, make(x), wanted)
    return make(cast_node(graph, x, wanted))


def cast_node(graph: fx.Graph, value: Any, dtype: torch.dtype) -> fx.Node:
    """Insert ``value.to(dtype)``, with its spec."""
    node = graph.call_method("to", (value, dtype))
    spec = spec_of(value)
    if spec is not None:
        node.meta["spec"] = TensorSpec(spec.shape, dtype, spec.device)
    return node
