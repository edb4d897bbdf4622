"""Results of a search: matches, near misses and the cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import fx

from schedule.patterns.compiling import Pattern
from schedule.patterns.normalized_nodes import NormalGraph, OpNode


@dataclass(frozen=True, eq=False)
class GraphMatch:
    """One match of a pattern in a graph.

    Attributes:
        pattern: the pattern.
        graph: the graph it was found in.
        normal: its normalized form.
        nodes: the fx nodes it consumes, in graph order.
        inputs: name → fx node, :class:`Attr` (a parameter no node reads yet) or constant; an input that the
            chosen alternatives do not reach has its default, else None.
        scalars: name → constant, or the fx node of a size; None if not reached.
        outputs: the consumed nodes whose values the pattern returns.
        choices: name → whether it is present (``optional``), or the index of the alternative (``any_of``); only
            the choices that were reached.
        calls: other nodes that call modules with results that the replacement lays out otherwise, or whose memory it
            uses; they must have no hooks.
        binding: pattern node → fx node, Attr, constant, or a tuple of these.
    """

    pattern: Pattern
    graph: fx.Graph
    normal: NormalGraph = field(repr=False)
    nodes: tuple[fx.Node, ...]
    inputs: dict[str, Any]
    scalars: dict[str, Any]
    outputs: tuple[fx.Node, ...]
    choices: dict[str, bool | int] = field(default_factory=dict)
    calls: tuple[fx.Node, ...] = ()
    binding: dict[OpNode, Any] = field(default_factory=dict, repr=False)
    order: tuple[int, ...] = field(default=(), repr=False)

    @property
    def source(self) -> str:
        """``file:line`` of the last consumed node, "" if unknown."""
        return next((n.meta["source"] for n in reversed(self.nodes) if n.meta.get("source")), "")


@dataclass(frozen=True)
class NearMiss:
    """Location of an almost complete match.

    Attributes:
        node: the name of the graph node at which it failed.
        expected: what the pattern has there.
        found: what the graph has there.
        matched: the number of operations that matched, of ``total``.
        source: ``file:line`` of ``node``, "" if unknown.
        at: the node itself; None for the whole graph.
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
    """Result of :func:`search`.

    Attributes:
        graph_matches: the disjoint matches in graph order.
        visited: the number of comparisons of a graph node with a pattern node, repeats included.
    """

    graph_matches: list[GraphMatch]
    visited: int
    _explain: Callable[[], list[NearMiss]] = field(repr=False)

    @cached_property
    def near_misses(self) -> list[NearMiss]:
        """Best partial matches at nodes outside of all matches, best first, computed on first access."""
        return self._explain()


class Region(Protocol):
    """Nodes to consume, and their positions."""

    @property
    def nodes(self) -> Collection[fx.Node]:
        """The consumed fx nodes."""

    @property
    def order(self) -> tuple[int, ...]:
        """Position of the first node, then the position of each node in the pattern's order."""


AnyRegion = TypeVar("AnyRegion", bound=Region)


def disjoint(regions: Iterable[AnyRegion]) -> list[AnyRegion]:
    """Select disjoint regions, those with most nodes first, then the earliest, and return them in graph order."""
    taken: set[fx.Node] = set()
    chosen: list[AnyRegion] = []
    for region in sorted(regions, key=lambda r: (-len(r.nodes), r.order)):
        if taken.isdisjoint(region.nodes):
            taken.update(region.nodes)
            chosen.append(region)
    chosen.sort(key=lambda r: r.order)
    return chosen


def resolve(graph_matches: Iterable[GraphMatch]) -> list[GraphMatch]:
    """Select the disjoint matches of greatest benefit and return them in graph order.

    The matches may be of several patterns. One with more consumed nodes is preferred; among equals the one
    earlier in the graph, then the one given earlier.
    """
    return disjoint(graph_matches)
