"""Reports, schedules and matches as HTML: every value is escaped, nothing is loaded from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from schedule.report import STATUSES, Entry, Report, grouped, paths_of
from schedule.runtime import state_of
from schedule.show import what_was_done
from schedule.tracing.specialisation import original_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schedule.matching import Match
    from schedule.tree import Schedule

_templates = Environment(
    loader=PackageLoader("schedule"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


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


def tree(sch: Schedule) -> str:
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
    return _templates.get_template("tree.html").render(top=branches[""])


def match(found: Match) -> str:
    """What was matched, what it reads, and the constants."""
    head, *rest = str(found).splitlines()
    lines = [line for line in rest if line.startswith("    ")]
    return _templates.get_template("match.html").render(
        head=head, lines=[line.strip() for line in lines], rest=[line.strip() for line in rest if line not in lines]
    )


def page(report: Report) -> str:
    """The report as a document of its own."""
    return _rendered("page.html", report)


def fragment(report: Report) -> str:
    """The report as part of a document, such as a notebook."""
    return _rendered("report.html", report)


def _rendered(template: str, report: Report) -> str:
    return _templates.get_template(template).render(
        model=type(report.model).__name__,
        counts={status: count for status in STATUSES if (count := report.count(status=status))},
        modules=len({entry.path for entry in report.select(status="applied")}),
        figures=report.figures(),
        calls=report.calls(),
        rules=_rows(report.entries),
    )


def _rows(entries: Sequence[Entry]) -> dict[str, list[Row]]:
    """Rule → its rows; rules that were applied first."""
    rules: dict[str, list[Row]] = {}
    for (rule, status, reason), alike in grouped(entries).items():
        places, modules = sum(entry.count for entry in alike), paths_of(entry.path for entry in alike)
        rules.setdefault(rule, []).append(Row(status, places, modules, reason, alike))
    return rules
