"""Conversion of a complete binding to a :class:`GraphMatch`, or to the reason for its rejection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from schedule.capture import TensorSpec
from schedule.patterns.compiling import Pattern
from schedule.patterns.graph_match import GraphMatch
from schedule.patterns.match_regions import RETURNED, absorb, detour, escape
from schedule.patterns.normalized_nodes import NormalGraph, OpNode, operands
from schedule.patterns.pattern_nodes import MISSING, CallNode, ChoiceNode
from schedule.patterns.unify import Unifier

Reason = tuple[OpNode, Callable[[], str], Callable[[], str]]


@dataclass(slots=True, eq=False)
class Complete:
    """Complete, sound binding, before overlapping ones are resolved."""

    nodes: set[fx.Node]
    order: tuple[int, ...]
    binding: dict[OpNode, Any]
    picks: dict[ChoiceNode, int]

    def graph_match(self, graph: fx.Graph, normal: NormalGraph, pattern: Pattern) -> GraphMatch:
        """Convert to the public form."""
        values = {node: plain(value) for node, value in self.binding.items()}
        picks = self.picks
        return GraphMatch(
            pattern=pattern,
            graph=graph,
            normal=normal,
            nodes=tuple(sorted(self.nodes)),
            inputs={n.name: values.get(n, None if n.default is MISSING else n.default) for n in pattern.input_nodes},
            scalars={n.name: values.get(n) for n in pattern.scalar_nodes},
            outputs=tuple(values[node] for node in pattern.outputs),
            choices={c.name: c.chosen(picks[c]) for c in pattern.choice_nodes if c in picks},
            binding=values,
            order=self.order,
        )


def finish(pattern: Pattern, state: Unifier, closed: bool) -> Complete | Reason:
    """Return the current binding as a region to consume, or the node and the reason of its rejection."""
    used = state.used
    consumed = {value: used[value] for value in used if not state.is_metadata(value)}
    reason = _half_a_call(state, consumed) or _other_dtype(state) or _crossed(pattern, state, consumed)
    if reason is not None:
        return reason
    binding = state.binding
    region = absorb([value.fx for value in consumed if value.fx is not None], state.normal.passed)
    if closed:
        reason = _open_region(state, region, [binding[node].fx for node in pattern.outputs])
        if reason is not None:
            return reason
    indices = [value.index for value in [binding[n] for n in pattern.required] if isinstance(value, OpNode)]
    return Complete(region, (min(indices), *indices), dict(binding), dict(state.picks))


def plain(value: Any) -> Any:
    """Convert a bound value to fx nodes, Attrs and constants, without OpNodes."""
    if isinstance(value, OpNode):
        return value.attr if value.fx is None else value.fx
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value)
    return value


def _half_a_call(state: Unifier, consumed: dict[OpNode, OpNode]) -> Reason | None:
    """Reject a binding of only one of the two operations of a single call."""
    if not state.normal.parts:
        return None
    for value, node in consumed.items():
        parts = state.normal.parts.get(value.fx) if value.fx is not None else None
        if parts is not None and not isinstance(node, CallNode) and any(p not in consumed for p in parts):
            return (
                value,
                lambda: "all of this call in the pattern",
                lambda: "a product with its bias in one call: decompose it first",
            )
    return None


def _other_dtype(state: Unifier) -> Reason | None:
    """Reject a binding of ``x.dtype`` in the pattern to a constant dtype other than x's."""
    for node, value in state.binding.items():
        if isinstance(value, torch.dtype) and node.op == "getattr":
            source = state.binding.get(node.args["input"])
            spec = source.spec if isinstance(source, OpNode) else None
            if not isinstance(spec, TensorSpec) or spec.dtype != value:
                at = source if isinstance(source, OpNode) else next(iter(state.used))
                return at, lambda spec=spec: f"the dtype of {spec}", lambda value=value: str(value)
    return None


def _crossed(pattern: Pattern, state: Unifier, consumed: dict[OpNode, OpNode]) -> Reason | None:
    """Reject a binding unless all outputs are consumed values and no input is."""
    for node in pattern.outputs:
        value = state.binding[node]
        if value not in consumed:
            at = value if isinstance(value, OpNode) else next(iter(state.used))
            return at, lambda: "an output that is computed here", lambda: "an input passed through"
    owned = {value.fx for value in consumed}
    for node in (*pattern.input_nodes, *pattern.scalar_nodes):
        for value in operands(state.binding.get(node)):
            if value.fx is not None and value.fx in owned:
                return (
                    value,
                    lambda name=node.name: f"{name} from outside",
                    lambda: "a value of the match itself",
                )
    return None


def _open_region(state: Unifier, region: set[fx.Node], ends: list[fx.Node]) -> Reason | None:
    """Reject a region with an interior value used outside, or with a path out of it and back in."""
    leak = escape(region, ends)
    if leak is not None:
        inner, user = leak
        found = f"it {RETURNED}" if user.op == "output" else f"a use by {user.name}"
        return state.normal.of[inner], lambda: "no use outside the match", lambda: found
    if len(ends) > 1:
        between = detour(region, ends)
        if between is not None:
            return (
                state.normal.of[between],
                lambda: "a match in one piece",
                lambda: f"{between.name}, computed from it and read by it",
            )
    return None
