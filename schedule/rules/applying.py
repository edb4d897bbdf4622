"""Application of rules to one graph: matches to rewrite, matches left alone, and the rewritten graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from schedule.capture import Path, leaves
from schedule.patterns import GraphMatch, SearchResult, normalize, resolve, search
from schedule.patterns.hazards import Hazards
from schedule.patterns.rewriting import check, rewrite, try_build
from schedule.patterns.saving import changed_later
from schedule.rules.rule import Rule
from schedule.util.errors import ScheduleError
from schedule.util.internal_errors import InternalError
from schedule.util.user_code import UserCodeError, user_code

Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Candidate:
    """Match of a rule left as it is, with the reason.

    Attributes:
        rule: the name of the rule.
        node: the name of the last node.
        source: the user's line, "" if unknown.
        reason: why it is left alone.
        kind: ``"skipped"`` (cannot be rewritten), ``"declined"`` (not profitable), ``"near miss"``.
    """

    rule: str
    node: str
    source: str
    reason: str
    kind: str


@dataclass
class Findings:
    """Results of applying rules to one graph.

    Attributes:
        chosen: the matches to rewrite, in graph order, without overlaps.
        rejected: the matches to leave alone.
        searched: every search made, for its near misses.
    """

    chosen: list[tuple[Rule, GraphMatch]] = field(default_factory=list)
    rejected: list[Candidate] = field(default_factory=list)
    searched: list[tuple[Rule, SearchResult]] = field(default_factory=list)


def find_all(
    graph: fx.Graph,
    rules: Iterable[Rule],
    modules: Modules,
    cost_guard: bool,
    settled: Collection[str] = (),
    read: Collection[Path] = (),
) -> Findings:
    """Find every match of every rule in ``graph``.

    Of overlapping matches, the one of the rule of highest rank is chosen, then the largest.

    Args:
        graph: the graph of one module, with leaf modules inlined.
        rules: rules, in order of preference among equals.
        modules: path → module, for the calls in the graph.
        cost_guard: leave alone matches that are not profitable.
        settled: families of rules exempt from the cost guard.
        read: paths in the output of the graph to tensors that are read outside.
    """
    findings = Findings()
    normal = normalize(graph, modules)
    candidates: dict[GraphMatch, Rule] = {}
    for rule in rules:
        covered: set[fx.Node] = set()
        for pattern, rarest in rule.possible(normal):
            if covered and all(node.fx in covered for node in rarest):
                continue  # a larger pattern of this rule covers all of them
            result = search(graph, pattern, modules)
            findings.searched.append((rule, result))
            for graph_match in filter(rule.about, result.graph_matches):
                candidate = _rejected(graph, rule, graph_match, modules, read)
                if candidate is not None:
                    findings.rejected.append(candidate)
                else:
                    candidates[graph_match] = rule
                    covered.update(graph_match.nodes)
    guarded = {rule for rule in candidates.values() if cost_guard and rule.family not in settled}
    _choose(candidates, guarded, findings)
    _forget_covered(findings)
    return findings


def _choose(candidates: Mapping[GraphMatch, Rule], guarded: Collection[Rule], findings: Findings) -> None:
    """Choose disjoint profitable candidates, highest rank first, then the largest, and sort them in graph order.

    A candidate that is not profitable leaves its nodes to others, of the same rank or below.

    Args:
        guarded: the rules subject to the check of profitability.
    """
    taken: set[fx.Node] = set()
    for rank in sorted({rule.rank for rule in candidates.values()}, reverse=True):
        free = [o for o, rule in candidates.items() if rule.rank == rank and taken.isdisjoint(o.nodes)]
        while free:
            declined: set[GraphMatch] = set()
            for graph_match in resolve(free):
                rule = candidates[graph_match]
                reason = rule.profitability(graph_match) if rule in guarded else ""
                if reason:
                    findings.rejected.append(_rejection(rule, graph_match, reason, "declined"))
                    declined.add(graph_match)
                else:
                    findings.chosen.append((rule, graph_match))
                    taken.update(graph_match.nodes)
            free = [o for o in free if declined and o not in declined and taken.isdisjoint(o.nodes)]
    findings.chosen.sort(key=lambda chosen: chosen[1].order)


def _rejected(
    graph: fx.Graph, rule: Rule, graph_match: GraphMatch, modules: Modules, read: Collection[Path]
) -> Candidate | None:
    """Return a candidate with the reason if ``rule`` rejects ``graph_match`` at any size, else None."""
    try:
        with user_code():
            no_gain = rule.no_gain(graph_match)
            if no_gain:
                return _rejection(rule, graph_match, no_gain, "declined")
            extra_check = rule.extra_check(graph_match) or _missed(graph, rule, graph_match, read)
            if not extra_check:
                _refuse_unsafe(graph, rule, graph_match, modules)
    except InternalError:
        raise
    except UserCodeError as error:
        extra_check = f"the rule raises {error}"
    except ScheduleError as error:
        extra_check = error.why
    return _rejection(rule, graph_match, extra_check, "skipped") if extra_check else None


def _missed(graph: fx.Graph, rule: Rule, graph_match: GraphMatch, read: Collection[Path]) -> str:
    """Return the reason if an output read outside of the graph would not be computed anymore, else ""."""
    discarded = [graph_match.outputs[number] for number in rule.discards if number < len(graph_match.outputs)]
    if not read or not discarded:
        return ""
    (returned,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    paths = {leaf: path for path, leaf in leaves(returned) if isinstance(leaf, fx.Node)}
    lost = [node.name for node in discarded if paths.get(node) is None or paths[node] in read]
    return f"{lost[0]}, which it would not compute, is read outside of the module" if lost else ""


def _refuse_unsafe(graph: fx.Graph, rule: Rule, graph_match: GraphMatch, modules: Modules) -> None:
    """Raise if the match cannot be replaced, or its replacement cannot be built."""
    check(graph, [graph_match], modules)
    build = rule.build_for(graph_match)
    if changed_later(graph_match.nodes, graph_match.outputs, Hazards(modules)):
        rewrite(graph, [graph_match], build, modules)  # on a copy, to find out whether it is allowed
    else:
        try_build(graph_match, build)


def _rejection(rule: Rule, graph_match: GraphMatch, reason: str, kind: str) -> Candidate:
    return Candidate(rule.name, max(graph_match.outputs).name, graph_match.source, reason, kind)


def _forget_covered(findings: Findings) -> None:
    """Drop rejected matches at nodes of chosen ones, and keep only the first reason for each node."""
    taken = {node.name for _, graph_match in findings.chosen for node in graph_match.nodes}
    rejected = {candidate.node: candidate for candidate in reversed(findings.rejected) if candidate.node not in taken}
    findings.rejected = list(reversed(rejected.values()))


def explain(graph: fx.Graph, rules: Iterable[Rule], modules: Modules, findings: Findings) -> list[Candidate]:
    """Return the locations a rule is about but does not rewrite: left alone on purpose, or near misses."""
    normal = normalize(graph, modules)
    known = {node.name for _, graph_match in findings.chosen for node in graph_match.nodes}
    known |= {candidate.node for candidate in findings.rejected}
    found: list[Candidate] = []
    for rule in rules:
        for (pattern, reason), ops in zip(rule.bystanders, rule.bystander_needs, strict=True):
            if all(normal.by_op.get(op) for op in ops):
                graph_matches = search(graph, pattern, modules).graph_matches
                reasons = [reason if isinstance(reason, str) else reason(each) for each in graph_matches]
                rejected = [_rejection(rule, o, why, "declined") for o, why in zip(graph_matches, reasons, strict=True)]
                found += [candidate for candidate in rejected if candidate.node not in known]
                known |= {candidate.node for candidate in rejected}
    settled = {rule.family for rule, _ in findings.chosen}
    settled |= {rule.family for rule in rules if any(p.rule == rule.name for p in (*findings.rejected, *found))}
    return found + _near_misses(findings, known, settled)


def _near_misses(findings: Findings, known: set[str], settled: set[str]) -> list[Candidate]:
    """Return the best near miss of each family without findings.

    More than two thirds of a pattern of three or more operations must match.
    """
    best: dict[str, tuple[float, Candidate]] = {}
    for rule, result in findings.searched:
        for miss in result.near_misses if rule.family not in settled else ():
            share = miss.matched / max(miss.total, 1)
            near = miss.total > 2 and share > max(2 / 3, best.get(rule.family, (0.0,))[0])
            if near and miss.node not in known:
                best[rule.family] = share, Candidate(rule.name, miss.node, miss.source, str(miss), "near miss")
    return [candidate for _, candidate in best.values()]


def rewritten(graph: fx.Graph, chosen: Sequence[tuple[Rule, GraphMatch]], modules: Modules) -> fx.Graph:
    """Return a copy of ``graph`` with every chosen match replaced.

    Raises:
        MatchError: one of them cannot be replaced; the graph is unchanged.
    """
    builds = iter([rule.build_for(graph_match) for rule, graph_match in chosen])

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        return next(builds)(graph, inputs, scalars)

    names = ", ".join(dict.fromkeys(rule.name for rule, _ in chosen))
    return rewrite(graph, [graph_match for _, graph_match in chosen], build, modules, by=f"optimize({names})")[0]
