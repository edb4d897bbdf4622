"""Search for a pattern in a graph: start at the rarest operation, follow data edges, backtrack on failure.

The cost depends on the candidates for the rarest operation, not on the graph: each is matched along data edges
only. Deterministic steps are taken first; commuted operands and alternatives wait until nothing else is left to
do. Those that cannot fit by structure alone are dropped through a memo, so that choices do not multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from schedule.patterns.compiling import Pattern, compile_pattern
from schedule.patterns.constants import describe
from schedule.patterns.finish import Complete, finish
from schedule.patterns.graph_match import GraphMatch, NearMiss, SearchResult, disjoint
from schedule.patterns.normalize import normalize
from schedule.patterns.normalized_nodes import NormalGraph, OpNode
from schedule.patterns.unify import Unifier

MAX_NEAR_MISSES = 5


def search(
    graph: fx.Graph,
    pattern: Any,
    modules: Mapping[str, nn.Module] | None = None,
    *,
    closed: bool = True,
) -> SearchResult:
    """Find the disjoint matches of ``pattern`` in ``graph``.

    Args:
        graph: the graph of one module; its normalized form is cached on it for the next search.
        pattern: a :class:`Pattern` or anything :func:`compile_pattern` takes.
        modules: path → module, for the ``call_module`` nodes.
        closed: leave out matches whose interior values are used outside, or that are not convex (they become
            near misses); False returns those too.

    Returns:
        Matches in graph order; overlaps are resolved as by :func:`resolve`.
    """
    pattern = compile_pattern(pattern)
    return _Search(graph, normalize(graph, modules), pattern, closed).run()


class _Search:
    def __init__(self, graph: fx.Graph, normal: NormalGraph, pattern: Pattern, closed: bool) -> None:
        self.graph, self.normal, self.pattern, self.closed = graph, normal, pattern, closed
        self.unifier = Unifier(normal, pattern)

    def run(self) -> SearchResult:
        anchor, candidates = self.anchor()
        attempts = [self.attempt(anchor, candidate) for candidate in candidates]
        chosen = disjoint([complete for complete in attempts if complete is not None])
        graph_matches = [complete.graph_match(self.graph, self.normal, self.pattern) for complete in chosen]
        return SearchResult(graph_matches, self.unifier.visited, lambda: self.explain(graph_matches))

    def anchor(self) -> tuple[OpNode, list[OpNode]]:
        """Return the required operation with the fewest candidates, and these candidates.

        Among equals it is the last one, which needs no search upward.
        """
        best: tuple[OpNode, list[OpNode]] | None = None
        for node in reversed(self.pattern.required):
            candidates = self.unifier.candidates(node)
            if candidates is not None and (best is None or len(candidates) < len(best[1])):
                best = (node, candidates)
        if best is None:  # every part is a choice that may be just an input: try everything
            best = (self.pattern.outputs[0], self.normal.nodes)
        return best

    def attempt(self, anchor: OpNode, candidate: OpNode) -> Complete | None:
        for _ in self.unifier.solutions(anchor, candidate):
            outcome = finish(self.pattern, self.unifier, self.closed)
            if isinstance(outcome, Complete):
                return outcome
            self.unifier.record(*outcome)
        return None

    def explain(self, graph_matches: list[GraphMatch]) -> list[NearMiss]:
        """Return the best failures as near misses.

        If the rarest operation is not in the graph at all, they are the failures at the next rarest one.
        """
        unifier = self.unifier
        if not unifier.failures:
            order = sorted(
                ((len(c), -i, n, c) for i, n in enumerate(self.pattern.required) if (c := unifier.candidates(n))),
                key=lambda row: row[:2],
            )
            for _, _, anchor, candidates in order[:1]:
                for candidate in candidates:
                    for _ in unifier.solutions(anchor, candidate):
                        break
        taken = {n for o in graph_matches for n in o.nodes}
        least = 1 if graph_matches else 0  # with real matches, a failure with nothing matched is not useful
        missed = [f for f in unifier.failures.values() if f.node.fx not in taken and f.matched >= least]
        missed.sort(key=lambda f: (-f.matched, f.node.index))
        total = self.pattern.size
        misses = [f.near_miss(self.pattern.name, total) for f in missed[:MAX_NEAR_MISSES]]
        if not misses and not graph_matches:
            misses.append(self.absent())
        return misses

    def absent(self) -> NearMiss:
        wanted = next((n for n in self.pattern.required if not self.unifier.candidates(n)), self.pattern.outputs[0])
        return NearMiss(self.pattern.name, "the whole graph", describe(wanted), "none", 0, self.pattern.size)
