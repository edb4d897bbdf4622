"""Reports, schedules and matches as HTML: every value is escaped, nothing is loaded from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from schedule.distributed.modules import is_sharded
from schedule.optimizer import survey
from schedule.pictures.page import Page, section
from schedule.report import STATUSES, Entry, Report, grouped, paths_of
from schedule.runtime import state_of
from schedule.show import what_was_done
from schedule.templating import rendered
from schedule.tracing.specialisation import original_class
from schedule.util.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schedule.matching import Match
    from schedule.node import Node


@dataclass(frozen=True)
class Row:
    """Modules in which a rule met the same fate for the same reason.

    Attributes:
        status: that fate.
        places: in how many places.
        modules: their paths, those that differ by numbers only as one.
        reason: why it was not applied, "" if it was.
        entries: one for each module.
    """

    status: str
    places: int
    modules: str
    reason: str
    entries: Sequence[Entry]


@dataclass
class Branch:
    """A module in the tree of a schedule.

    Attributes:
        name: its last name.
        kind: its class.
        done: what was done to it.
        fallbacks: how many of its calls ran the original forward.
        children: the modules in it.
    """

    name: str
    kind: str
    done: list[str]
    fallbacks: int
    children: list[Branch] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether anything was done to it or below."""
        return bool(self.done) or any(child.changed for child in self.children)


def tree(sch: Node) -> str:
    """The modules under ``sch`` with what was done to each; open where anything was."""
    done = what_was_done(sch)
    branches: dict[str, Branch] = {}
    for name, node in sch.named_schedules():
        state = state_of(node.module)
        kind, fallbacks = original_class(node.module).__name__, 0 if state is None else state.fallbacks
        shown = name.rpartition(".")[2] or sch.label
        branches[name] = Branch(shown, kind, done.get(node.path, []), fallbacks)
        if name:
            branches[name.rpartition(".")[0]].children.append(branches[name])
    return str(rendered("tree.html", top=branches[""]))


def match(found: Match) -> str:
    """What was matched, what it reads, and the constants."""
    head, *rest = str(found).splitlines()
    lines = [line for line in rest if line.startswith("    ")]
    others = [line.strip() for line in rest if line not in lines]
    return str(rendered("match.html", head=head, lines=[line.strip() for line in lines], rest=others))


def page(report: Report) -> str:
    """The report as a document of its own, with the pictures of the schedule that made it."""
    sch = report.schedule
    pictures = "" if sch is None else section(sch, report.entries, report.timing)
    return str(rendered("page.html", pictures=pictures, **_values(report)))


def fragment(report: Report) -> str:
    """The report as part of a document, such as a notebook."""
    return str(rendered("report.html", **_values(report)))


def schedule_page(sch: Node) -> Page:
    """The pictures of a schedule, and what the default rules leave alone in it as it is now."""
    entries = [] if is_sharded(sch.tree.root) else survey(sch)
    name = original_class(sch.module).__name__
    title = f"{name}: {sch.path}" if sch.path else name
    pictures = section(sch, entries)
    rules = _rows([entry for entry in entries if entry.status != "applied"])
    steps = [step.description for step in sch.history]
    text = rendered("schedule.html", title=title, steps=steps, pictures=pictures, rules=rules)
    return Page(str(text), title)


def _values(report: Report) -> dict[str, Any]:
    return {
        "model": type(report.model).__name__,
        "counts": {status: count for status in STATUSES if (count := report.count(status=status))},
        "rewritten": _rewritten(report.select(status="applied")),
        "figures": report.figures(),
        "calls": report.calls(),
        "rules": _rows(report.entries),
    }


def _rewritten(applied: Sequence[Entry]) -> str:
    places = sum(entry.count for entry in applied)
    modules = counted(len({entry.path for entry in applied}), "module")
    return f"{counted(places, 'place')} of {modules} {'was' if places == 1 else 'were'} rewritten"


def _rows(entries: Sequence[Entry]) -> dict[str, list[Row]]:
    """Rule → its rows; rules that were applied first."""
    rules: dict[str, list[Row]] = {}
    for (rule, status, reason), alike in grouped(entries).items():
        places, modules = sum(entry.count for entry in alike), paths_of(entry.path for entry in alike)
        rules.setdefault(rule, []).append(Row(status, places, modules, reason, alike))
    return rules
