"""A report as a page: every value is escaped, nothing is loaded from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from schedule.report import STATUSES, Entry, Report, grouped, paths_of

if TYPE_CHECKING:
    from collections.abc import Sequence

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
