"""What a search hands back: matches, near misses, the cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import fx

from schedule.patterns.compiling import Pattern
from schedule.patterns.values import OpNode


@dataclass(frozen=True, eq=False)
class GraphMatch:
    """One place where a pattern was found.

    Attributes:
        pattern: what was looked for.
        graph: where it was found.
        nodes: the fx nodes it consumes, in graph order.
        inputs: name → fx node, :class:`Attr` (a parameter no node reads yet) or constant; an input that the
            chosen alternatives do not reach has its default, else None.
        scalars: name → constant, or the fx node of a size; None if not reached.
        outputs: the consumed nodes whose values the pattern returns.
        choices: name → present (``optional``) or which alternative (``any_of``); only those that were
            reached.
        binding: pattern node → fx node, Attr, constant, or a tuple of these.
    """

    pattern: Pattern
    graph: fx.Graph
    nodes: tuple[fx.Node, ...]
    inputs: dict[str, Any]
    scalars: dict[str, Any]
    outputs: tuple[fx.Node, ...]
    choices: dict[str, bool | int] = field(default_factory=dict)
    binding: dict[OpNode, Any] = field(default_factory=dict, repr=False)
    order: tuple[int, ...] = field(default=(), repr=False)

    @property
    def source(self) -> str:
        """``file:line`` of the last consumed node, "" if unknown."""
        return next((n.meta["source"] for n in reversed(self.nodes) if n.meta.get("source")), "")


@dataclass(frozen=True)
class NearMiss:
    """Where a pattern almost matched.

    Attributes:
        node: the graph node at which it failed.
        expected: what the pattern has there.
        found: what the graph has there.
        matched: how many operations fitted, of ``total``.
        source: ``file:line`` of ``node``, "" if unknown.
        at: the node itself; None if it is the whole graph.
    """

    pattern: str
    node: str
    expected: str
    found: str
    matched: int
    total: int
    source: str = ""
    at: fx.Node | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        where = f"{self.node} ({self.source})" if self.source else self.node
        return (
            f"{self.pattern}: {self.matched} of {self.total} operations match; "
            f"at {where} expected {self.expected}, found {self.found}"
        )


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What :func:`search` found.

    Attributes:
        matches: disjoint, in graph order.
        visited: graph nodes compared with pattern nodes, repeats counted.
    """

    graph_matches: list[GraphMatch]
    visited: int
    _explain: Callable[[], list[NearMiss]] = field(repr=False)

    @cached_property
    def near_misses(self) -> list[NearMiss]:
        """The best partial matches that are no part of a match, best first; made when first read."""
        return self._explain()


class Region(Protocol):
    """Nodes to consume, and where they are."""

    @property
    def nodes(self) -> Collection[fx.Node]:
        """The consumed fx nodes."""

    @property
    def order(self) -> tuple[int, ...]:
        """Position of the first node, then of each, in the pattern's order."""


AnyRegion = TypeVar("AnyRegion", bound=Region)


def disjoint(regions: Iterable[AnyRegion]) -> list[AnyRegion]:
    """The disjoint regions of greatest benefit, in graph order: most nodes first, then the earliest."""
    taken: set[fx.Node] = set()
    kept: list[AnyRegion] = []
    for region in sorted(regions, key=lambda r: (-len(r.nodes), r.order)):
        if taken.isdisjoint(region.nodes):
            taken.update(region.nodes)
            kept.append(region)
    kept.sort(key=lambda r: r.order)
    return kept


def resolve(graph_matches: Iterable[GraphMatch]) -> list[GraphMatch]:
    """The disjoint matches of greatest benefit, in graph order; they may stem from several patterns.

    More consumed nodes come first; among equals the one earlier in the graph, then the one given earlier.
    """
    return disjoint(graph_matches)
