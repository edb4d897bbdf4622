"""Requirements of a pattern operation on a graph node, and the small records of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from schedule.patterns.constants import same_kind_matters
from schedule.patterns.graph_match import NearMiss
from schedule.patterns.normalized_nodes import OpNode, is_constant, is_number
from schedule.patterns.pattern_nodes import ChoiceNode

Pair = tuple[Any, Any]


@dataclass(slots=True)
class Failure:
    """Deepest point reached from one anchor."""

    matched: int
    node: OpNode
    expected: Callable[[], str]
    found: Callable[[], str]

    def near_miss(self, pattern: str, total: int) -> NearMiss:
        """Convert the failure to a near miss."""
        source = self.node.fx.meta.get("source", "") if self.node.fx is not None else ""
        return NearMiss(
            pattern, self.node.name, self.expected(), self.found(), self.matched, total, source or "", self.node.fx
        )


@dataclass(slots=True)
class Option:
    """One way to continue: the pairs to match, and the alternative taken, if any."""

    pairs: tuple[Pair, ...]
    pick: tuple[ChoiceNode, int] | None = None


@dataclass(slots=True)
class Point:
    """Choice point: the trail position to undo to, the options left, and the postponed choices."""

    mark: int
    options: Iterator[Option]
    waiting: list[Pair]


@dataclass(slots=True)
class Plan:
    """Requirements of a pattern operation on a graph node, computed once.

    Attributes:
        names: the argument names.
        constants: configuration by name, except dimension numbers, which are in ``dims``.
        operands: arguments that are one pattern node, last first, without the commuting pair.
        nested: arguments with pattern nodes nested inside.
        commutes: whether the first two arguments may be swapped.
        swaps: whether it is a ``transpose`` of two constant dimensions.
    """

    names: Any
    constants: list[tuple[str, Any]]
    dims: list[tuple[str, Any]]
    operands: list[tuple[str, OpNode]]
    nested: list[tuple[str, Any]]
    commutes: bool
    swaps: bool

    @classmethod
    def of(cls, node: OpNode) -> Plan:
        """Build the plan for one operation of the pattern."""
        commutes = node.commutes
        rest = list(node.args.items())[2 * commutes :]
        dims = node.definition.dims if node.definition is not None else frozenset()
        fixed = [(k, v) for k, v in rest if is_constant(v)]
        swaps = node.op == "transpose" and {"dim0", "dim1"} <= {k for k, _ in fixed}
        return cls(
            names=node.args.keys(),
            constants=[(k, v) for k, v in fixed if k not in dims],
            dims=[] if swaps else [(k, v) for k, v in fixed if k in dims],
            operands=[(k, v) for k, v in reversed(rest) if isinstance(v, OpNode)],
            nested=[(k, v) for k, v in rest if not isinstance(v, OpNode) and not is_constant(v)],
            commutes=commutes,
            swaps=swaps,
        )


def outwards(users: list[OpNode], at: int) -> Iterator[OpNode]:
    """Yield the users before and after position ``at`` in turn, farther and farther out."""
    for distance in range(max(at, len(users) - at) + 1):
        if distance < at:
            yield users[at - 1 - distance]
        if at + distance < len(users):
            yield users[at + distance]


def other_kind(node: OpNode, value: OpNode) -> bool:
    """Check whether a number among two commuting operands is 2 instead of 2.0 and this changes the dtype."""
    expected, found = ([v for v in list(n.args.values())[:2] if is_number(v)] for n in (node, value))
    return len(expected) == len(found) == 1 and same_kind_matters(expected[0], found[0], value)


def nested_pairs(expected: Any, value: Any) -> list[Pair] | None:
    """Pair the items of two nestings of one shape, or return None if the shapes differ."""
    if isinstance(expected, tuple) and isinstance(value, tuple) and len(expected) == len(value):
        return list(zip(expected, value, strict=True))
    if isinstance(expected, slice) and isinstance(value, slice):
        return [(getattr(expected, end), getattr(value, end)) for end in ("start", "stop", "step")]
    if isinstance(expected, dict) and isinstance(value, dict) and expected.keys() == value.keys():
        return [(expected[key], value[key]) for key in expected]
    return None
