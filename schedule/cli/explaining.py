"""Why a rule does or does not apply in a module: as ``optimize`` decides it, with the nearest miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from schedule.api.optimize import optimize
from schedule.api.schedule import Schedule
from schedule.core.matching import Match
from schedule.report.entries import Entry, grouped, paths_of
from schedule.report.report import Report
from schedule.rules import Rule
from schedule.util.errors import MatchError, ScheduleError
from schedule.util.wording import counted


@dataclass(frozen=True)
class Verdict:
    """What became of a rule in a module and below it.

    Attributes:
        rule: its name.
        module: the module.
        entries: where it applies and where not, with reasons.
        matches: the matched part of the graph, once for modules alike.
        nearest: how far it came, if nothing is known of it otherwise; None if the module has nothing like it.
    """

    rule: str
    module: str
    entries: list[Entry]
    matches: list[str] = field(default_factory=list)
    nearest: ScheduleError | None = None

    @property
    def applies(self) -> bool:
        """Whether the rule rewrites anything here."""
        return any(entry.status == "applied" for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        nearest = None if self.nearest is None else self.nearest.to_dict()
        entries = [asdict(entry) for entry in self.entries]
        return {"rule": self.rule, "applies": self.applies, "entries": entries, "nearest": nearest}

    def __rich__(self) -> RenderableType:
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        head = f"{self.rule} {'applies' if self.applies else 'does not apply'} in {self.module}"
        yield Text(head, style="bold green" if self.applies else "bold yellow")
        for (_, status, reason), alike in grouped(self.entries).items():
            times = sum(entry.count for entry in alike)
            where = paths_of(entry.path for entry in alike)
            if status == "applied":
                yield Text(f"  applied to {counted(times, 'match', 'matches')}: {where}")
            else:
                told = MatchError(f"{status}: {reason}", module=where, where=alike[0].source)
                yield Text("  ") + told.__rich__()
        yield from (Text(match) for match in self.matches)
        if self.nearest is not None:
            yield self.nearest.__rich__()
        elif not self.entries:
            yield Text("  it computes nothing that the rule is about")


def verdict(node: Schedule, rule: Rule, cost_guard: bool) -> Verdict:
    """What becomes of ``rule`` in ``node`` and below; the model is afterwards as it was."""
    before = len(node.history)
    report = optimize(node, rules=[rule], cost_guard=cost_guard)
    while len(node.history) > before:
        node.undo()
    if report.entries:
        return Verdict(rule.name, node.label, report.entries, list(_matches(node.root, rule, report)))
    return Verdict(rule.name, node.label, [], nearest=_nearest(node, rule))


def _matches(root: Schedule, rule: Rule, report: Report) -> Iterator[str]:
    """The first match of each group of modules whose paths differ by numbers only."""
    first: dict[str, str] = {}
    for entry in report.select(status="applied"):
        first.setdefault(paths_of([entry.path, f"{entry.path}.0"]), entry.path)
    alike: dict[tuple[str, ...], Match] = {}
    for path in first.values():
        for match in (root[path] if path else root).find(rule.name):
            alike.setdefault(tuple(str(node.target) for node in match.nodes), match)
    yield from map(str, alike.values())


def _nearest(node: Schedule, rule: Rule) -> ScheduleError | None:
    """How far one of the rule's patterns came in the graph of ``node``, or why there is none; None if it is there."""
    try:
        node.find(rule.name, expect=1)
    except ScheduleError as error:
        error.asked, error.fix, error.why = "", "", f"nearest: {error.why.rpartition('nearest: ')[2]}"
        return error
    return None
