"""What :func:`schedule.optimize` did, module by module, and what it is worth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from schedule.report.costs import Cost, TimeRatio
from schedule.report.entries import STATUSES, Entry, Status, grouped, paths_of, rows_of
from schedule.report.pictures.page import section
from schedule.runtime.scheduled import Adaptation, state_of
from schedule.util.errors import NotApplicable
from schedule.util.files import refuse_unwritable, write
from schedule.util.printing import printed
from schedule.util.templating import rendered
from schedule.util.wording import counted, size_text

if TYPE_CHECKING:
    from torch import nn

    from schedule.core.node import Node


@dataclass(repr=False)
class Report:
    """What was rewritten, what was not and why; prints as a table, also in a notebook.

    Attributes:
        entries: by module, in the order of the model.
        costs: measures ``{"before": …, "after": …}``: bytes saved for backward and dispatched operations of one
            training step. Called when first asked for; NotApplicable says that they cannot be measured.
        model: the scheduled module.
        time_ratio: measures, over so many rounds, the time of a training step over that of the original model.
        schedule: what it is a report of, with the steps: ``report.schedule.undo()``.
        timing: what :meth:`timed` measured last; None before it was asked for.
        unmeasured: why :attr:`measured` is empty; "" where it is not, and before it was asked for.
    """

    entries: list[Entry]
    model: nn.Module
    costs: Callable[[], dict[str, Cost]] = dict
    time_ratio: Callable[[int], TimeRatio] | None = None
    schedule: Node | None = None
    timing: TimeRatio | None = field(default=None, init=False)
    unmeasured: str = field(default="", init=False)
    _measured: dict[str, Cost] | None = field(default=None, init=False)

    def select(self, rule: str | None = None, status: Status | None = None) -> list[Entry]:
        """The entries of a rule, a status, or both."""
        return [e for e in self.entries if rule in (None, e.rule) and status in (None, e.status)]

    def count(self, rule: str | None = None, status: Status = "applied") -> int:
        """In how many places."""
        return sum(entry.count for entry in self.select(rule, status))

    @property
    def applied(self) -> dict[str, int]:
        """Rule → in how many places it was applied."""
        counts: Counter[str] = Counter()
        for entry in self.select(status="applied"):
            counts[entry.rule] += entry.count
        return dict(counts)

    @property
    def measured(self) -> dict[str, Cost]:
        """Costs before and after; empty where they cannot be measured. Runs the model when first read."""
        if self._measured is None:
            try:
                self._measured = self.costs()
            except NotApplicable as error:
                self._measured, self.unmeasured = {}, error.why
        return self._measured

    def timed(self, rounds: int = 5) -> TimeRatio:
        """Time training steps of the scheduled and of the original model in turns; the report shows it from then on.

        The model, its parameters and the random state stay as they were. Sizes are those of the batch that
        ``optimize`` was given, so give it one that is worth timing.

        Raises:
            ValueError: ``rounds`` is less than 1.
            NotApplicable: the report has no model that runs, such as one on the meta device.
        """
        if rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {rounds}")
        if self.time_ratio is None:
            raise NotApplicable(
                "this report was not made by schedule.optimize",
                asked="Report.timed",
                fix="report = schedule.optimize(model, batch)",
            )
        self.timing = self.time_ratio(rounds)
        return self.timing

    @property
    def fallbacks(self) -> dict[str, int]:
        """Scheduled module → how many of its calls ran the original forward so far."""
        states = ((path, state_of(module)) for path, module in self.model.named_modules())
        return {path: state.fallbacks for path, state in states if state is not None and state.fallbacks}

    @property
    def adapted(self) -> dict[str, list[str]]:
        """Scheduled module → the further kinds of calls it has graphs for since, and what is rewritten in them."""
        return self._adaptations(lambda each: each.summary)

    @property
    def declined(self) -> dict[str, list[str]]:
        """Scheduled module → why calls of further kinds run its original forward."""
        return self._adaptations(lambda each: "" if each.specializations else each.declined.why)

    def _adaptations(self, text: Callable[[Adaptation], str]) -> dict[str, list[str]]:
        states = ((path, state_of(module)) for path, module in self.model.named_modules())
        found = {path: [t for t in map(text, state.adaptations) if t] for path, state in states if state is not None}
        return {path: texts for path, texts in found.items() if texts}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "applied": self.applied,
            "entries": [asdict(entry) for entry in self.entries],
            "costs": {when: asdict(cost) for when, cost in self.measured.items()},
            "unmeasured": self.unmeasured,
            "time": None if self.timing is None else asdict(self.timing),
            "fallbacks": self.fallbacks,
            "adapted": self.adapted,
            "declined": self.declined,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """As :meth:`to_dict`, as text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self, path: str | Path | None = None) -> str:
        """One page with all of it and pictures of the modules, which needs nothing from elsewhere.

        Graphs are drawn, and bytes measured, when this is called.

        Args:
            path: where to write it too; the file is there as a whole or not at all.

        Raises:
            NotApplicable: ``path`` cannot be written; found out before anything is drawn.
        """
        if path is not None:
            refuse_unwritable(Path(path), "report")
        pictures = "" if self.schedule is None else section(self.schedule, self.entries, self.timing)
        text = str(rendered("page.html", pictures=pictures, **self._values()))
        if path is not None:
            write(Path(path), text)
        return text

    def _repr_html_(self) -> str:
        return str(rendered("report.html", **self._values()))

    def _values(self) -> dict[str, Any]:
        """What the templates need."""
        return {
            "model": type(self.model).__name__,
            "counts": {status: count for status in STATUSES if (count := self.count(status=status))},
            "rewritten": _rewritten(self.select(status="applied")),
            "figures": self.figures(),
            "calls": self.calls(),
            "rules": rows_of(self.entries),
        }

    def __rich__(self) -> RenderableType:
        table = Table(title=Text(f"schedule.optimize: {type(self.model).__name__}"), title_justify="left")
        for name in ("rule", "", "places", "modules", "why"):
            table.add_column(name, justify="right" if name == "places" else "left", overflow="fold")
        for (rule, status, reason), entries in grouped(self.entries).items():
            places = str(sum(entry.count for entry in entries))
            table.add_row(*map(Text, (rule, status, places, paths_of(e.path for e in entries), reason)))
        if not self.entries:
            table.add_row("–", "", "0", "", "no rule is about anything in this model: nothing was changed")
        table.caption = Text("\n".join(self._summary()))
        table.caption_justify = "left"
        return table

    def _summary(self) -> list[str]:
        return [f"{what}: {value}" for what, value in [*self.figures(), *self.calls()]]

    def figures(self) -> list[tuple[str, str]]:
        """What was measured, before and after: (what, figures)."""
        found = []
        if {"before", "after"} <= self.measured.keys():
            before, after = self.measured["before"], self.measured["after"]
            saved = f"{size_text(before.saved_bytes)} → {size_text(after.saved_bytes)}"
            found = [
                ("saved for backward", f"{saved} ({_ratio(after.saved_bytes, before.saved_bytes)})"),
                (
                    "dispatched operations",
                    f"{before.dispatched:,} → {after.dispatched:,} ({_ratio(after.dispatched, before.dispatched)})",
                ),
            ]
        if self.unmeasured:
            found = [("saved for backward", f"not measured: {self.unmeasured.splitlines()[0]}")]
        return found if self.timing is None else [*found, ("time of a training step", str(self.timing))]

    def calls(self) -> list[tuple[str, str]]:
        """What calls unlike the recorded ones ran: (what, in which modules)."""
        found, fallbacks = [], self.fallbacks
        for count in sorted(set(fallbacks.values())):
            paths = paths_of(path for path, of_path in fallbacks.items() if of_path == count)
            found.append(("calls unlike the recorded ones, which ran the original forward", f"{count} of {paths}"))
        found += [("adapted to calls unlike the recorded ones", line) for line in _by_text(self.adapted)]
        return found + [("no graph for calls unlike the recorded ones", line) for line in _by_text(self.declined)]

    def __str__(self) -> str:
        return printed(self, 120)

    def __repr__(self) -> str:
        counts = [f"{count} {status}" for status in STATUSES if (count := self.count(status=status))]
        return f"Report({type(self.model).__name__}: {', '.join(counts) or 'nothing found'})"


def _rewritten(applied: Sequence[Entry]) -> str:
    places = sum(entry.count for entry in applied)
    modules = counted(len({entry.path for entry in applied}), "module")
    return f"{counted(places, 'place')} of {modules} {'was' if places == 1 else 'were'} rewritten"


def _by_text(table: dict[str, list[str]]) -> list[str]:
    """Equal texts together, with the modules they are about."""
    texts = dict.fromkeys(text for of_path in table.values() for text in of_path)
    return [f"{text} in {paths_of(path for path, own in table.items() if text in own)}" for text in texts]


def _ratio(after: int, before: int) -> str:
    return f"{after / before:.2f} ×" if before else "–"
