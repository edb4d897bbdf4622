"""From patterns to matches: one logical place in a module, in all of its specialisations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx, nn

from schedule import patterns, rules
from schedule.errors import MatchError, TraceError
from schedule.patterns import NearMiss, Occurrence, Pattern, SearchResult
from schedule.patterns.nodes import CallNode
from schedule.recording import Recording
from schedule.rewriting import Erased, erased
from schedule.rules import Rule
from schedule.show import graph_lines
from schedule.tracing.expansion import Expansion, expand
from schedule.tracing.specialisation import Specialisation

if TYPE_CHECKING:
    from schedule.tree import Schedule


@dataclass(frozen=True, eq=False)
class Site:
    """Where a match is in one specialisation: an occurrence in its graph with leaf modules opened."""

    found_in: Specialisation
    occurrence: Occurrence
    origin: Mapping[str, str]

    @property
    def pattern(self) -> Pattern:
        """What was looked for."""
        return self.occurrence.pattern

    @property
    def inputs(self) -> dict[str, Any]:
        """As those of a match."""
        return self.occurrence.inputs

    @property
    def opened(self) -> set[str]:
        """The module calls to open before the occurrence can be replaced: it is in them, or spans what they do."""
        node, last = min(self.occurrence.nodes), max(self.occurrence.nodes)
        calls = {self.origin.get(last.name)}
        while node is not last:
            calls.add(self.origin.get(node.name))
            node = node.next
        return {call for call in calls if call is not None}

    def in_current(self, specialisations: Sequence[Specialisation]) -> int | None:
        """Which of the module's graphs now is the one this was found in, or stems from it."""
        key = (self.found_in.training, self.found_in.call.key())
        own = [i for i, made in enumerate(specialisations) if made.graph is self.found_in.graph]
        like = [i for i, made in enumerate(specialisations) if (made.training, made.call.key()) == key]
        return next(iter(own + like), None)


class Match:
    """One place where a pattern was found; given to ``fuse`` and ``replace``.

    Attributes:
        schedule: the module it is in.
        sites: the occurrence in each specialisation (training and not, further signatures).
        rule: the registered rule whose pattern it is, if any.
        search: what it was found by, if by a search of one module's graphs.
    """

    def __init__(
        self, schedule: Schedule, sites: Sequence[Site], rule: Rule | None = None, search: Search | None = None
    ) -> None:
        self.schedule, self.sites, self.rule, self.search = schedule, tuple(sites), rule, search

    @property
    def path(self) -> str:
        """The module it is in."""
        return self.schedule.path

    @property
    def name(self) -> str:
        """The rule's name, or the pattern's."""
        return self.rule.name if self.rule is not None else self.pattern.name

    @property
    def pattern(self) -> Pattern:
        """What was looked for."""
        return self._first.pattern

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The consumed nodes, in graph order."""
        return self._first.nodes

    @property
    def inputs(self) -> dict[str, Any]:
        """Input of the pattern → node, parameter (``Attr``) or constant."""
        return dict(self._first.inputs)

    @property
    def scalars(self) -> dict[str, Any]:
        """Named constant of the pattern → its value, or the node of a size."""
        return dict(self._first.scalars)

    @property
    def choices(self) -> dict[str, bool | int]:
        """``optional`` or ``any_of`` of the pattern → what the graph has."""
        return dict(self._first.choices)

    @property
    def source(self) -> str:
        """``file:line`` of the user's code, "" if unknown."""
        return self._first.source

    @property
    def _first(self) -> Occurrence:
        return self.sites[0].occurrence

    def show(self) -> None:
        """Print the matched part of the graph, what it reads and the constants."""
        print(str(self))

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        lines = [f"{self.name} in {self.schedule.label}{where}"]
        lines += [f"    {line}" for line in graph_lines(list(self.nodes))]
        named = {**self.inputs, **self.scalars}
        lines += ["  where " + ", ".join(f"{k} = {_value(v)}" for k, v in named.items())] if named else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from schedule.html import match  # jinja2 is loaded when first needed

        return match(self)

    def __repr__(self) -> str:
        return f"Match({self.name} in {self.schedule.label}: {', '.join(n.name for n in self.nodes)})"


def _value(value: Any) -> str:
    path = getattr(value, "path", None)
    if isinstance(value, fx.Node) and value.op == "get_attr":
        path = value.target
    return f"self.{path}" if path else str(value)


# -- finding ------------------------------------------------------------------------------------------------


def find_in(members: Sequence[Schedule], pattern: Any, expect: int | None) -> list[Match]:
    """Every match of ``pattern`` in the graphs of ``members``, in order.

    Raises:
        TraceError: a member cannot be traced.
        MatchError: not as many as expected; says where the pattern nearly matched.
    """
    wanted = Wanted.of(pattern)
    for member in members:
        member.refuse_inside_other_graph()
    graphs = members[0].tree.graphs
    failed = graphs.ensure([member.module for member in members])
    for member in members:
        if member.module in failed:
            error = failed[member.module]
            raise TraceError(error.why, fix=error.fix, where=error.where, module=member.label)
    together = Found(members, wanted)
    searches, found = together.searches, together.matches
    if expect is not None and len(found) != expect:
        raise _unexpected(searches, wanted, expect, found)
    return found


@dataclass(frozen=True)
class Wanted:
    """What is looked for: one pattern, or all of a rule's; ``given`` is what ``find`` was called with."""

    name: str
    patterns: tuple[Pattern, ...]
    rule: Rule | None
    given: Any

    @staticmethod
    def of(pattern: Any) -> Wanted:
        """From anything that ``find`` takes."""
        rule = pattern if isinstance(pattern, rules.Rule) else rules.rule_for(pattern)
        if rule is not None:
            return Wanted(rule.name, rule.patterns, rule, pattern)
        compiled = patterns.compile_pattern(pattern)
        return Wanted(compiled.name, (compiled,), None, pattern)


class Found:
    """All that one ``find`` found.

    Attributes:
        wanted: what it looked for.
        paths: where the searched modules were.
        after: the steps of the schedule that were applied then.
        searches: one for each module.
    """

    def __init__(self, members: Sequence[Schedule], wanted: Wanted) -> None:
        self.wanted, self.paths = wanted, [member.path for member in members]
        self.after = members[0].tree.history.steps
        self.searches = [Search(member, wanted, self) for member in members]

    @property
    def matches(self) -> list[Match]:
        """Those of every module, in order."""
        return [match for search in self.searches for match in search.matches]


class Search:
    """One search of one module's graphs; ``found`` is what it is a part of."""

    def __init__(self, member: Schedule, wanted: Wanted, found: Found) -> None:
        self.member, self.wanted, self.found = member, wanted, found
        self.results: list[SearchResult] = []
        sites = []
        for made in member.specialisations:
            own, results = sites_in(made, member.module, member.tree.graphs.recording, wanted)
            self.results += results
            sites.append(own)
        self.matches = [Match(member, together, wanted.rule, self) for together in _paired(sites)]

    def near_misses(self) -> list[tuple[str, NearMiss]]:
        """Where the patterns almost matched."""
        return [(self.member.label, miss) for result in self.results for miss in result.near_misses]


def sites_in(
    made: Specialisation, module: nn.Module, recording: Recording, wanted: Wanted
) -> tuple[list[Site], list[SearchResult]]:
    """Where ``wanted`` occurs in one graph of ``module``, and what each search saw."""
    modules = dict(module.named_modules())
    expansion = expand(made, module, recording, _opened_for(wanted.patterns, made.graph, modules))
    results = [patterns.search(expansion.graph, pattern, modules) for pattern in wanted.patterns]
    found = patterns.resolve(occurrence for result in results for occurrence in result.occurrences)
    if wanted.rule is not None:
        found = [occurrence for occurrence in found if not wanted.rule.objection(occurrence)]
    return [Site(made, occurrence, expansion.origin) for occurrence in found], results


def _opened_for(wanted: Sequence[Pattern], graph: fx.Graph, modules: Mapping[str, Any]) -> Collection[str] | None:
    """The calls to open: all but those that the patterns name themselves; None if they name none."""
    named = [node for pattern in wanted for node in pattern.digraph.nodes if isinstance(node, CallNode)]
    if not named:
        return None
    return [
        node.name
        for node in graph.nodes
        if node.op == "call_module"
        and not any(call.accepts(str(node.target), modules.get(str(node.target))) for call in named)
    ]


def _paired(sites: list[list[Site]]) -> list[list[Site]]:
    """The same place in several graphs: by order where all have as many, else by the names of the outputs."""
    if len({len(each) for each in sites}) <= 1:
        return [list(together) for together in zip(*sites, strict=True)]
    places: dict[tuple[str, ...], list[Site]] = {}
    for each in sites:
        for site in each:
            places.setdefault(tuple(node.name for node in site.occurrence.outputs), []).append(site)
    return list(places.values())


def _unexpected(searches: Sequence[Search], wanted: Wanted, expect: int, found: list[Match]) -> MatchError:
    why = f"{wanted.name} was found {len(found)} times in {len(searches)} module(s), expected {expect}"
    if len(found) > expect:
        where = "\n".join(f"{match.schedule.label}: {match.source or match.nodes[-1].name}" for match in found[:5])
        return MatchError(why, where=where, fix="say more in the pattern, or expect as many")
    misses = [miss for search in searches for miss in search.near_misses()]
    best = max(misses, key=lambda item: (item[1].matched, item[1].at is not None), default=None)
    if best is None:
        return MatchError(why, fix="look at sch.graph, and at the modules below")
    return MatchError(
        f"{why}; nearest: {best[1]}",
        module=best[0],
        node=best[1].at,
        fix="bring the pattern in line with what is there (optional, any_of, scalar), or expect as many",
    )


def find_parallel_in(members: Sequence[Schedule], pattern: Any, expect: int | None) -> list[list[Match]]:
    """Matches that read one value under one input's name, together; single ones are left out.

    Raises:
        MatchError: not as many groups as expected.
    """
    found = find_in(members, pattern, None)
    groups = [group for member in members for group in parallel([m for m in found if m.schedule is member])]
    if expect is not None and len(groups) != expect:
        raise MatchError(
            f"{len(groups)} groups of parallel matches were found, expected {expect}",
            where="\n".join(", ".join(m.nodes[-1].name for m in group) for group in groups),
            fix="parallel matches read the same value under the same input of the pattern",
        )
    return groups


T = TypeVar("T", Match, Site)


def parallel(found: Sequence[T]) -> list[list[T]]:
    """What reads one value under one input's name, together; single ones are left out."""
    groups: list[list[T]] = []
    taken: set[T] = set()
    for one in found:
        if one in taken:
            continue
        for name in one.pattern.inputs:
            value = one.inputs.get(name)
            if not isinstance(value, fx.Node) or value.op == "get_attr":
                continue
            group = [other for other in found if other not in taken and other.inputs.get(name) is value]
            if len(group) > 1:
                groups.append(group)
                taken.update(group)
                break
    return groups


# -- finding again ------------------------------------------------------------------------------------------


def rebound(site: Site, expansion: Expansion) -> Occurrence:
    """The occurrence in a copy of the graph it was found in, or in what became of that graph.

    Raises:
        MatchError: its nodes are gone or wired otherwise; says which primitive consumed them.
    """
    occurrence, graph = site.occurrence, expansion.graph
    names: dict[str, fx.Node] = {node.name: node for node in graph.nodes}
    gone = erased(graph)
    consumed = frozenset(occurrence.nodes)

    def here(node: fx.Node) -> fx.Node:
        twin = names.get(node.name)
        if twin is not None and (twin.op, twin.target) == (node.op, node.target):
            return twin
        if node not in consumed:
            was: Erased | None = gone.get(node.name)
            while was is not None and was.successor is not None:
                successor: fx.Node = was.successor
                if names.get(successor.name) is successor:
                    return successor
                was = gone.get(successor.name)
            call = names.get(site.origin.get(node.name, ""))
            if call is not None and call.op == "call_module":
                return call
        raise _lost(site, node, gone)

    nodes = tuple(here(node) for node in occurrence.nodes)
    for old, new in zip(occurrence.nodes, nodes, strict=True):
        if list(dict.fromkeys(map(here, old.all_input_nodes))) != new.all_input_nodes:
            raise MatchError(
                f"what {new.name} reads has changed since {occurrence.pattern.name} was found",
                fix="find it again",
            )

    def move(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return here(value)
        return tuple(map(move, value)) if isinstance(value, tuple) else value

    return replace(
        occurrence,
        graph=graph,
        nodes=nodes,
        outputs=move(occurrence.outputs),
        inputs={name: move(value) for name, value in occurrence.inputs.items()},
        scalars={name: move(value) for name, value in occurrence.scalars.items()},
        binding={},
    )


def _lost(site: Site, node: fx.Node, gone: Mapping[str, Erased]) -> MatchError:
    name = site.occurrence.pattern.name
    call = site.origin.get(node.name)
    was = gone.get(node.name) or (gone.get(call) if call else None)
    if was is not None:
        by = was.by or "another rewrite"
        return MatchError(f"this match of {name} was already consumed by {by}", fix="find it again")
    if call is not None:
        return MatchError(
            f"the module called as {call} can no longer be opened: it was hooked, wrapped or replaced since",
            fix="remove the hook, or find again",
        )
    return MatchError(f"{node.name}, part of this match of {name}, is no longer in the graph", fix="find it again")


def keep_erased(old: fx.Graph, new: fx.Graph) -> None:
    """Hand on which nodes rewrites took out of ``old``, and keep their names unused in ``new``, its copy."""
    names = {node.name: node for node in new.nodes}
    for name, was in erased(old).items():
        new._graph_namespace.create_name(name, None)
        successor = names.get(was.successor.name) if was.successor is not None else None
        erased(new)[name] = Erased(successor, was.by)
