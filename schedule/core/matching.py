"""Search for patterns in modules: each match is one logical location in all specializations of a module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx, nn

from schedule import patterns, rules
from schedule.capture import Recording, Specialization, expand
from schedule.core.node import Node
from schedule.patterns import GraphMatch, NearMiss, Pattern, SearchResult
from schedule.patterns.normalized_nodes import OpNode
from schedule.patterns.ops import is_foreign, qualified_name
from schedule.patterns.pattern_nodes import CallNode
from schedule.rules import Rule
from schedule.util.errors import MatchError, TraceError, did_you_mean
from schedule.util.graph_text import graph_lines
from schedule.util.templating import rendered
from schedule.util.wording import counted


@dataclass(frozen=True, eq=False)
class Site:
    """Location of a match in one specialization, in its graph with leaf modules inlined.

    Attributes:
        found_in: the specialization.
        graph_match: the match in a copy of its graph.
        origin: name of a node from an inlined module → name of the call it came from.
        called: path → module, for the module calls consumed by the match.
    """

    found_in: Specialization
    graph_match: GraphMatch
    origin: Mapping[str, str]
    called: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def pattern(self) -> Pattern:
        """The pattern of the match."""
        return self.graph_match.pattern

    @property
    def inputs(self) -> dict[str, Any]:
        """Inputs of the match, as in :class:`GraphMatch`."""
        return self.graph_match.inputs

    @property
    def inlined(self) -> set[str]:
        """Module calls to inline before a replacement: origins of all nodes from the match's first to its last."""
        node, last = min(self.graph_match.nodes), max(self.graph_match.nodes)
        calls = {self.origin.get(last.name)}
        while node is not last:
            calls.add(self.origin.get(node.name))
            node = node.next
        return {call for call in calls if call is not None}

    def in_current(self, specializations: Sequence[Specialization]) -> int | None:
        """Return the index of the graph it was found in, else of one with the same mode and call, else None."""
        key = (self.found_in.training, self.found_in.call.key())
        own = [i for i, made in enumerate(specializations) if made.graph is self.found_in.graph]
        like = [i for i, made in enumerate(specializations) if (made.training, made.call.key()) == key]
        return next(iter(own + like), None)


class Match:
    """One match of a pattern in a module, for ``fuse`` and ``replace``.

    Attributes:
        schedule: the node of its module.
        sites: the match in each specialization (training and eval mode, further signatures).
        rule: the registered rule of the pattern, if any.
        search: the search of the module's graphs by which it was found, if any.
    """

    def __init__(
        self, schedule: Node, sites: Sequence[Site], rule: Rule | None = None, search: Search | None = None
    ) -> None:
        self.schedule, self.sites, self.rule, self.search = schedule, tuple(sites), rule, search

    @property
    def path(self) -> str:
        """The path of its module."""
        return self.schedule.path

    @property
    def name(self) -> str:
        """The rule's name, or the pattern's."""
        return self.rule.name if self.rule is not None else self.pattern.name

    @property
    def pattern(self) -> Pattern:
        """The pattern of the match."""
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
        """``optional`` → whether it is present, ``any_of`` → the index of the alternative."""
        return dict(self._first.choices)

    @property
    def source(self) -> str:
        """``file:line`` of the user's code, "" if unknown."""
        return self._first.source

    @property
    def _first(self) -> GraphMatch:
        return self.sites[0].graph_match

    def show(self) -> None:
        """Print the matched part of the graph, its inputs and its constants."""
        print(str(self))

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        lines = [f"{self.name} in {self.schedule.label}{where}"]
        lines += [f"    {line}" for line in graph_lines(list(self.nodes))]
        named = {**self.inputs, **self.scalars}
        lines += ["  where " + ", ".join(f"{k} = {_value(v)}" for k, v in named.items())] if named else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head, *rest = str(self).splitlines()
        lines = [line for line in rest if line.startswith("    ")]
        others = [line.strip() for line in rest if line not in lines]
        return str(rendered("match.html", head=head, lines=[line.strip() for line in lines], rest=others))

    def __repr__(self) -> str:
        return f"Match({self.name} in {self.schedule.label}: {', '.join(n.name for n in self.nodes)})"


def _value(value: Any) -> str:
    path = getattr(value, "path", None)
    if isinstance(value, fx.Node) and value.op == "get_attr":
        path = value.target
    return f"self.{path}" if path else str(value)


def holds(node: Node, match: Match) -> bool:
    """Check whether ``match`` is in the module of ``node`` or below."""
    return match.schedule.tree is node.tree and f"{match.path}.".startswith(f"{node.path}." if node.path else "")


# -- finding ------------------------------------------------------------------------------------------------


def find_in(members: Sequence[Node], pattern: Any, expect: int | None, closed: bool = True) -> list[Match]:
    """Return all matches of ``pattern`` in the graphs of ``members``, in order.

    Raises:
        TraceError: a member cannot be traced.
        MatchError: not as many as expected (reports the best near miss), or an unknown name.
    """
    wanted = Wanted.of(pattern, closed)
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
    if not found and isinstance(pattern, str) and wanted.rule is None:
        _refuse_misspelt(members[0].tree.root, wanted)
    if not found:
        _refuse_no_operation(members, wanted)
    if expect is not None and len(found) != expect:
        raise _unexpected(searches, wanted, expect, found)
    return found


def named_matches(members: Sequence[Node], matches: Any) -> Any:
    """Return ``matches``, or those of the rule that it names in ``members``.

    Raises:
        MatchError: there is no such rule, or nothing that it matches; reports the best near miss.
    """
    if isinstance(matches, (list, tuple)):
        return matches
    if not isinstance(matches, str):
        kind = getattr(matches, "__name__", type(matches).__name__)
        raise MatchError(f"{kind} is not what find() returned", fix="give find(pattern), or the name of a rule")
    if rules.rule_for(matches) is None:
        raise rules.unknown_rule(matches)
    return find_in(members, matches, None) or find_in(members, matches, 1)


def _refuse_misspelt(root: nn.Module, wanted: Wanted) -> None:
    """Raise if a string names no rule and, as a regular expression, no module of the model."""
    text: str = wanted.given
    calls = [node for node in wanted.patterns[0].digraph.nodes if isinstance(node, CallNode)]
    if any(call.accepts(path, module) for call in calls for path, module in root.named_modules() if path):
        return
    family = [rule.name for rule in rules.list_rules(text)]
    if family:
        fix = f"it is a family: find each of its rules, {', '.join(family)}"
    else:
        fix = did_you_mean(text, [rule.name for rule in rules.list_rules()])
    raise MatchError(
        f"there is no rule {text!r}, and no module whose path it matches",
        fix=fix or "schedule.list_rules() names the rules, sch.show() the modules",
    )


def _refuse_no_operation(members: Sequence[Node], wanted: Wanted) -> None:
    """Raise if a pattern calls something that is no operation of torch and that no graph of ``members`` calls."""
    nodes = [node for pattern in wanted.patterns for node in pattern.digraph if type(node) is OpNode]
    calls = {node.op for node in nodes if node.definition is None and is_foreign(node.op)}
    for graph in (made.graph for member in members for made in member.specializations) if calls else ():
        calls -= {qualified_name(node.target) for node in graph.nodes if node.op in ("call_function", "call_method")}
    if calls:
        raise MatchError(
            f"the pattern {wanted.name} calls {', '.join(sorted(calls))}, which is no operation of torch, and which "
            "nothing here calls",
            fix="write the pattern in operations of torch, or call a module in it: schedule.call_module",
        )


@dataclass(frozen=True)
class Wanted:
    """Patterns to search for: one, or all of a rule (``given`` and ``closed`` are arguments of ``find``)."""

    name: str
    patterns: tuple[Pattern, ...]
    rule: Rule | None
    given: Any
    closed: bool = True

    @staticmethod
    def of(pattern: Any, closed: bool = True) -> Wanted:
        """Make the patterns from any argument accepted by ``find``."""
        rule = pattern if isinstance(pattern, rules.Rule) else rules.rule_for(pattern)
        if rule is not None:
            return Wanted(rule.name, rule.patterns, rule, pattern, closed)
        compiled = patterns.compile_pattern(pattern)
        return Wanted(compiled.name, (compiled,), None, pattern, closed)


class Found:
    """Result of one ``find``.

    Attributes:
        wanted: the patterns it searched for.
        paths: the paths of the searched modules.
        after: the steps of the schedule applied at that time.
        searches: one for each module.
    """

    def __init__(self, members: Sequence[Node], wanted: Wanted) -> None:
        self.wanted, self.paths = wanted, [member.path for member in members]
        self.after = members[0].tree.history.steps
        self.searches = [Search(member, wanted, self) for member in members]

    @property
    def matches(self) -> list[Match]:
        """The matches of all modules, in order."""
        return [match for search in self.searches for match in search.matches]


class Search:
    """Search of one module's graphs, as part of ``found``."""

    def __init__(self, member: Node, wanted: Wanted, found: Found) -> None:
        self.member, self.wanted, self.found = member, wanted, found
        self.results: list[SearchResult] = []
        sites = []
        for made in member.specializations:
            own, results = sites_in(made, member.module, member.tree.graphs.recording, wanted)
            self.results += results
            sites.append(own)
        self.matches = [Match(member, together, wanted.rule, self) for together in _paired(sites)]

    def near_misses(self) -> list[tuple[str, NearMiss]]:
        """Return the near misses of the patterns, each with its module's label."""
        return [(self.member.label, miss) for result in self.results for miss in result.near_misses]


def sites_in(
    made: Specialization, module: nn.Module, recording: Recording, wanted: Wanted
) -> tuple[list[Site], list[SearchResult]]:
    """Find ``wanted`` in one graph of ``module``, and return the sites and the results of each search."""
    modules = dict(module.named_modules(remove_duplicate=False))
    expansion = expand(made, module, recording, _inlined_for(wanted.patterns, made.graph, modules))
    results = [patterns.search(expansion.graph, each, modules, closed=wanted.closed) for each in wanted.patterns]
    found = patterns.resolve(graph_match for result in results for graph_match in result.graph_matches)
    if wanted.rule is not None:
        found = [graph_match for graph_match in found if not wanted.rule.extra_check(graph_match)]
    return [Site(made, each, expansion.origin, _called(each, modules)) for each in found], results


def _called(graph_match: GraphMatch, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {str(node.target): modules[str(node.target)] for node in graph_match.nodes if node.op == "call_module"}


def _inlined_for(wanted: Sequence[Pattern], graph: fx.Graph, modules: Mapping[str, Any]) -> Collection[str] | None:
    """Return the calls to inline: all except those named by the patterns, or None if they name no calls."""
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
    """Group the same match across graphs: by order if all have equally many, else by the names of the outputs."""
    if len({len(each) for each in sites}) <= 1:
        return [list(together) for together in zip(*sites, strict=True)]
    by_outputs: dict[tuple[str, ...], list[Site]] = {}
    for each in sites:
        for site in each:
            by_outputs.setdefault(tuple(node.name for node in site.graph_match.outputs), []).append(site)
    return list(by_outputs.values())


def _times(found: Sequence[Any]) -> str:
    return "once" if len(found) == 1 else f"{len(found)} times"


def _unexpected(searches: Sequence[Search], wanted: Wanted, expect: int, found: list[Match]) -> MatchError:
    why = f"{wanted.name} was found {_times(found)} in {counted(len(searches), 'module')}, expected {expect}"
    if len(found) > expect:
        where = "\n".join(f"{match.schedule.label}: {match.source or match.nodes[-1].name}" for match in found[:5])
        return MatchError(why, where=where, fix="say more in the pattern, or expect as many")
    misses = [miss for search in searches for miss in search.near_misses()]
    best = max(misses, key=lambda item: (item[1].matched, item[1].at is not None), default=None)
    if best is None:
        return MatchError(why, fix="look at sch.graph, and at the modules below")
    if wanted.rule is not None:
        fix = f"optimize(sch, rules=[{wanted.name!r}]) says where it fits, and why not elsewhere"
        return MatchError(f"{why}; nearest: {best[1]}", module=best[0], node=best[1].at, fix=fix)
    return MatchError(
        f"{why}; nearest: {best[1]}",
        module=best[0],
        node=best[1].at,
        fix="bring the pattern in line with what is there (optional, any_of, scalar), or expect as many",
    )


def find_parallel_in(members: Sequence[Node], pattern: Any, expect: int | None) -> list[list[Match]]:
    """Return groups of matches reading the same value under the same input name, without single ones.

    Raises:
        MatchError: not as many groups as expected.
    """
    found = find_in(members, pattern, None)
    groups = [group for member in members for group in parallel([m for m in found if m.schedule is member])]
    if expect is not None and len(groups) != expect:
        raise MatchError(
            f"{counted(len(groups), 'group')} of parallel matches found, expected {expect}",
            where="\n".join(", ".join(m.nodes[-1].name for m in group) for group in groups),
            fix="parallel matches read the same value under the same input of the pattern",
        )
    return groups


T = TypeVar("T", Match, Site)


def parallel(found: Sequence[T]) -> list[list[T]]:
    """Group matches or sites reading the same value under the same input name, and leave out single ones."""
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
