"""Rules applied to one graph: what they find, what they leave alone and why, and the graph afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from schedule.errors import MatchError
from schedule.patterns import Occurrence, normalise, resolve, search
from schedule.rewriting import check, rewrite
from schedule.rules.rule import Rule

Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Place:
    """An occurrence of a rule that is not rewritten.

    Attributes:
        rule: its rule.
        node: the last node.
        source: the user's line, "" if unknown.
        reason: why it is left alone.
        kind: ``"skipped"`` (cannot be rewritten), ``"declined"`` (would not pay), ``"near miss"``.
    """

    rule: str
    node: str
    source: str
    reason: str
    kind: str


@dataclass
class Findings:
    """What rules find in one graph.

    Attributes:
        chosen: what to rewrite, in graph order, without overlaps.
        places: what to leave alone.
    """

    chosen: list[tuple[Rule, Occurrence]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


def find_all(graph: fx.Graph, rules: Iterable[Rule], modules: Modules, cost_guard: bool) -> Findings:
    """Every occurrence of every rule in ``graph``; overlaps go to the one that consumes most.

    Args:
        graph: the graph of one module, leaf modules opened.
        rules: rules, in order of preference among equals.
        modules: path → module, for the calls in the graph.
        cost_guard: leave alone what would not pay.
    """
    findings = Findings()
    normal = normalise(graph, modules)
    candidates: dict[Occurrence, Rule] = {}
    for rule in rules:
        for pattern in rule.possible(normal):
            for occurrence in search(graph, pattern, modules).occurrences:
                futile = rule.futile(occurrence)
                objection = "" if futile else rule.objection(occurrence) or _unsafe(graph, occurrence, modules)
                if futile or objection:
                    kind = "declined" if futile else "skipped"
                    findings.places.append(_place(rule, occurrence, futile or objection, kind))
                else:
                    candidates[occurrence] = rule
    kept = resolve(candidates)
    for occurrence in kept:
        rule = candidates[occurrence]
        reason = rule.thrift(occurrence) if cost_guard else ""
        if reason:
            findings.places.append(_place(rule, occurrence, reason, "declined"))
        else:
            findings.chosen.append((rule, occurrence))
    _forget_covered(findings)
    return findings


def _unsafe(graph: fx.Graph, occurrence: Occurrence, modules: Modules) -> str:
    try:
        check(graph, [occurrence], modules)
    except MatchError as error:
        return error.why
    return ""


def _place(rule: Rule, occurrence: Occurrence, reason: str, kind: str) -> Place:
    return Place(rule.name, occurrence.outputs[-1].name, occurrence.source, reason, kind)


def _forget_covered(findings: Findings) -> None:
    """A place that another pattern took is no news; of several reasons for one place the first stays."""
    taken = {node.name for _, occurrence in findings.chosen for node in occurrence.nodes}
    places = {place.node: place for place in reversed(findings.places) if place.node not in taken}
    findings.places = list(reversed(places.values()))


def explain(graph: fx.Graph, rules: Iterable[Rule], modules: Modules, findings: Findings) -> list[Place]:
    """Places that a rule is about and did not take: left alone on purpose, or nearly matched."""
    normal = normalise(graph, modules)
    taken = {node for _, occurrence in findings.chosen for node in occurrence.nodes}
    known = {place.node for place in findings.places}
    found: list[Place] = []
    for rule in rules:
        for pattern, reason in rule.bystanders:
            for occurrence in search(graph, pattern, modules).occurrences:
                name = occurrence.outputs[-1].name
                if taken.isdisjoint(occurrence.nodes) and name not in known:
                    known.add(name)
                    found.append(_place(rule, occurrence, reason, "declined"))
        found += _near_miss(graph, rule, normal, modules, taken, known)
    return found


def _near_miss(
    graph: fx.Graph, rule: Rule, normal: Any, modules: Modules, taken: set[fx.Node], known: set[str]
) -> list[Place]:
    """The pattern of ``rule`` that came nearest, if it came past half of its operations."""
    names = {node.name for node in taken} | known
    best = None
    for pattern in rule.possible(normal):
        for miss in search(graph, pattern, modules).near_misses:
            share = miss.matched / max(miss.total, 1)
            if share > 0.5 and miss.node not in names and (best is None or share > best[0]):
                best = (share, miss)
    return [] if best is None else [Place(rule.name, best[1].node, best[1].source, str(best[1]), "near miss")]


def rewritten(graph: fx.Graph, chosen: Sequence[tuple[Rule, Occurrence]], modules: Modules) -> fx.Graph:
    """A copy of ``graph`` with every chosen occurrence replaced.

    Raises:
        MatchError: one of them cannot be replaced; the graph is untouched.
    """
    rules = iter([rule for rule, _ in chosen])

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        return next(rules).build(graph, inputs, scalars)

    names = ", ".join(dict.fromkeys(rule.name for rule, _ in chosen))
    return rewrite(graph, [occurrence for _, occurrence in chosen], build, modules, by=f"optimize({names})")[0]
