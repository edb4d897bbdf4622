"""Explanation of the decision of ``optimize`` on a rule in a module, with the nearest miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from schedule.api.optimize import optimize
from schedule.api.schedule import Schedule
from schedule.core.matching import Match
from schedule.report.entries import Entry, paths_of, rows_of
from schedule.report.report import Report
from schedule.rules import Rule
from schedule.util.errors import MatchError, ScheduleError
from schedule.util.wording import counted


@dataclass(frozen=True)
class Verdict:
    """Result of a rule in a module and all below.

    Attributes:
        rule: name of the rule.
        module: label of the module.
        entries: report entries of the rule, with reasons.
        matches: the matched parts of graphs, once per group of similar modules.
        nearest: the best partial match, if there are no entries; None if the module has nothing like the pattern.
    """

    rule: str
    module: str
    entries: list[Entry]
    matches: list[str] = field(default_factory=list)
    nearest: ScheduleError | None = None

    @property
    def applies(self) -> bool:
        """True if the rule rewrites anything in the module."""
        return any(entry.status == "applied" for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        nearest = None if self.nearest is None else self.nearest.to_dict()
        entries = [asdict(entry) for entry in self.entries]
        return {"rule": self.rule, "applies": self.applies, "entries": entries, "nearest": nearest}

    def __rich__(self) -> RenderableType:
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        head = f"{self.rule} {'applies' if self.applies else 'does not apply'} in {self.module}"
        yield Text(head, style="bold green" if self.applies else "bold yellow")
        for row in rows_of(self.entries):
            if row.status == "applied":
                yield Text(f"  applied to {counted(row.matches, 'match', 'matches')}: {row.modules}")
            else:
                told = MatchError(f"{row.status}: {row.reason}", module=row.modules, where=row.entries[0].source)
                yield Text("  ") + told.__rich__()
        yield from (Text(match) for match in self.matches)
        if self.nearest is not None:
            yield self.nearest.__rich__()
        elif not self.entries:
            yield Text("  it computes nothing that the rule is about")


def verdict(node: Schedule, rule: Rule, cost_guard: bool) -> Verdict:
    """Return the result of ``rule`` in ``node`` and below, and restore the model."""
    before = len(node.history)
    report = optimize(node, rules=[rule], cost_guard=cost_guard)
    while len(node.history) > before:
        node.undo()
    if report.entries:
        return Verdict(rule.name, node.label, report.entries, list(_matches(node.root, rule, report)))
    return Verdict(rule.name, node.label, [], nearest=_nearest(node, rule))


def _matches(root: Schedule, rule: Rule, report: Report) -> Iterator[str]:
    """Yield the first match of each group of modules with paths differing only in numbers."""
    first: dict[str, str] = {}
    for entry in report.select(status="applied"):
        first.setdefault(paths_of([entry.path, f"{entry.path}.0"]), entry.path)
    alike: dict[tuple[str, ...], Match] = {}
    for path in first.values():
        for match in (root[path] if path else root).find(rule.name):
            alike.setdefault(tuple(str(node.target) for node in match.nodes), match)
    yield from map(str, alike.values())


def _nearest(node: Schedule, rule: Rule) -> ScheduleError | None:
    """Return an error with the best partial match of ``rule`` in the graph of ``node``.

    It holds the reason if ``node`` cannot be traced. None if the rule matches.
    """
    try:
        node.find(rule.name, expect=1)
    except ScheduleError as error:
        error.asked, error.fix, error.why = "", "", f"nearest: {error.why.rpartition('nearest: ')[2]}"
        return error
    return None
