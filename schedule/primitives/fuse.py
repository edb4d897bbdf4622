"""``fuse``: one call per match, of a fused op or of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from schedule import rules
from schedule.core.adapting import Adapter, adapter_for
from schedule.core.matching import Match, Site, Wanted
from schedule.patterns import GraphMatch
from schedule.patterns.rewriting import Build
from schedule.primitives.callees import CompiledRegion, Region, region_of
from schedule.primitives.registry import primitive
from schedule.primitives.repeating import ByPattern, Item, Prepare, of_searches
from schedule.primitives.splicing import MatchGroup, refuse_foreign, splice_in
from schedule.rules import Rule
from schedule.util.errors import NotApplicable

if TYPE_CHECKING:
    from schedule.core.node import Node, NodeT

Compiler = Literal["auto", "inductor"]


@primitive
def fuse(sch: NodeT, matches: Sequence[Match], compiler: Compiler | None = "auto") -> NodeT:
    """Replace each match by one call, of a rule's fused op or of the same operations compiled.

    ::

        before:  y = F.linear(x, self.c_fc.weight);  z = F.gelu(y + self.c_fc.bias, approximate="tanh")
        after:   y = F.linear(x, self.c_fc.weight);  z = bias_gelu(y, self.c_fc.bias)

    Parameters keep their paths. Training, eval and every recorded signature are rewritten together.

    Args:
        matches: result of ``find``.
        compiler: ``"auto"`` takes the registered fused op if any rule matches the same operations, else
            ``"inductor"``: the matched part is compiled by ``torch.compile`` at its first call, with dynamic
            shapes, or runs uncompiled without a compiler. None only makes it one call.

    Raises:
        MatchError: a match is of another model, consumed already (gives the primitive), or unsafe: an
            interior value is used outside, operations would change order, or a hook would be bypassed.
        NotApplicable: no matches; an unknown compiler; or the module is inlined in another module's graph.
    """
    if compiler not in ("auto", "inductor", None):
        raise NotApplicable(f"there is no compiler {compiler!r}", fix='"auto", "inductor" or None')
    refuse_foreign(sch, [[match] for match in matches])
    places: list[list[Match]] = []
    chosen: dict[Match, Rule] = {}
    for match in matches:
        ruled = _as_rule_sees_it(match) if compiler == "auto" else None
        if ruled is not None and ruled.rule is not None:
            chosen[ruled] = ruled.rule
        places.append([ruled or match])

    def prepare(place: MatchGroup, graph_match: GraphMatch) -> tuple[GraphMatch, Build]:
        rule = chosen.get(place[0])
        if rule is not None:
            return graph_match, rule.build
        return region_of(graph_match, place[0].name, Region if compiler is None else CompiledRegion)

    def repeat(node: Node, _: Sequence[MatchGroup]) -> Adapter | None:
        own = [[match] for match in matches if match.schedule is node]
        return adapter_for(node, of_searches(own, lambda wanted, sizes: FuseAgain(wanted, compiler)))

    splice_in(sch, places, prepare, repeat)
    return sch


class FuseAgain(ByPattern):
    """Rewrite to fuse all matches of a pattern."""

    def __init__(self, wanted: Wanted, compiler: Compiler | None) -> None:
        super().__init__(wanted)
        self.compiler = compiler

    def settings(self) -> tuple[Any, ...]:
        """Return the compiler."""
        return (self.compiler,)

    def planned(self, places: Sequence[Sequence[Site]], module: nn.Module) -> tuple[list[Item], Prepare]:
        """Plan the rewrite of :func:`fuse`."""
        items: list[Item] = []
        for (site,) in places:
            seen = self._as_rule_sees_it(site.graph_match)
            items.append((seen and seen[0], [Site(site.found_in, seen[1], site.origin) if seen else site]))

        def prepare(rule: Rule | None, graph_match: GraphMatch) -> tuple[GraphMatch, Build]:
            if rule is not None:
                return graph_match, rule.build
            return region_of(graph_match, self.name, Region if self.compiler is None else CompiledRegion)

        return items, prepare

    def _as_rule_sees_it(self, graph_match: GraphMatch) -> tuple[Rule, GraphMatch] | None:
        if self.compiler != "auto":
            return None
        return (self.wanted.rule, graph_match) if self.wanted.rule is not None else rules.rule_at(graph_match)


def _as_rule_sees_it(match: Match) -> Match | None:
    """Return the match by the pattern of a rule for the same nodes, or None if a graph has none."""
    if match.rule is not None:
        return match
    sites, rule = [], None
    for site in match.sites:
        seen = rules.rule_at(site.graph_match)
        if seen is None:
            return None
        rule = seen[0]
        sites.append(replace(site, graph_match=seen[1]))
    return Match(match.schedule, sites, rule, match.search)
