"""Report on :func:`schedule.optimize`: its rewrites in each module, and their effect."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from schedule.report import headline
from schedule.report.costs import Cost, TimeRatio
from schedule.report.entries import STATUSES, Entry, Status, paths_of, rows_of
from schedule.report.headline import Figure, Tone
from schedule.report.pictures.page import section
from schedule.runtime.scheduled import Adaptation, ScheduledState, state_of, states_in, uncounted
from schedule.util.arguments import refuse_no_count
from schedule.util.errors import NotApplicable
from schedule.util.files import refuse_unwritable, write
from schedule.util.internal_errors import INTERNAL
from schedule.util.printing import in_progress, printed, terminal_width
from schedule.util.templating import rendered
from schedule.util.wording import counted
from schedule.verify.equivalence_report import EquivalenceReport
from schedule.verify.verification import Verification

if TYPE_CHECKING:
    from torch import nn

    from schedule.core.node import Node

ADAPTED = "graphs for other kinds of calls"
"""Name of the lines about these, of which text on a terminal shows the count alone."""

_STYLES: dict[Tone, str] = {"good": "green", "bad": "bold red", "neutral": "default"}


@dataclass(repr=False)
class Report:
    """Rewrites applied and not applied, with reasons, printed as a table, also in a notebook.

    Attributes:
        entries: by module, in model order.
        costs: measures ``{"before": …, "after": …}``: bytes kept for backward and dispatched operations of one
            training step. Raises NotApplicable if they cannot be measured. Called by :meth:`measure` alone.
        model: the scheduled module.
        time_ratio: measures the time of a training step divided by the original model's, over a number of rounds, and
            calls a function after each.
        hints: name of a figure → what gets it, where that is no method of the report.
        schedule: the schedule reported on, with the steps: ``report.schedule.undo()``.
        timing: last result of :meth:`timed`; None before its first call.
        measured: last result of :meth:`measure`; empty before its first call.
        unmeasured: why the last call of :meth:`measure` failed; "" if it did not, and before its first call.
    """

    entries: list[Entry]
    model: nn.Module
    costs: Callable[[], dict[str, Cost]] = dict
    time_ratio: Callable[[int, Callable[[], None]], TimeRatio] | None = None
    schedule: Node | None = None
    timing: TimeRatio | None = field(default=None, init=False)
    measured: dict[str, Cost] = field(default_factory=dict, init=False)
    unmeasured: str = field(default="", init=False)
    hints: Mapping[str, str] = field(default_factory=dict, init=False)

    def select(self, rule: str | None = None, status: Status | None = None) -> list[Entry]:
        """Return the entries of a rule, a status, or both."""
        return [e for e in self.entries if rule in (None, e.rule) and status in (None, e.status)]

    def count(self, rule: str | None = None, status: Status = "applied") -> int:
        """Return the number of matches with ``status``, of one rule or all."""
        return sum(entry.count for entry in self.select(rule, status))

    @property
    def applied(self) -> dict[str, int]:
        """Rule → number of matches it was applied to."""
        counts: Counter[str] = Counter()
        for entry in self.select(status="applied"):
            counts[entry.rule] += entry.count
        return dict(counts)

    def measure(self, *, progress: bool = True) -> dict[str, Cost]:
        """Run a training step with the rewrites and one without, and return and keep their costs.

        The report shows them afterwards. The model, its parameters and the random state do not change. Nothing else
        in a report runs the model, except :meth:`timed` and the pictures of :meth:`to_html`.

        Args:
            progress: show a progress bar in a terminal.

        Returns:
            ``{"before": …, "after": …}``: bytes kept for backward and dispatched operations.

        Raises:
            NotApplicable: the model does not train on its example inputs, is on the meta device, or is sharded.
        """
        self.measured, self.unmeasured = {}, ""
        try:
            with in_progress(None, "measuring a training step, before and after", progress):
                self.measured = self.costs()
        except NotApplicable as error:
            self.unmeasured = error.why
            raise
        return self.measured

    def measure_if_possible(self) -> None:
        """Measure once, and keep the reason in :attr:`unmeasured` if that fails."""
        if not self.measured and not self.unmeasured:
            with contextlib.suppress(NotApplicable):
                self.measure()

    def timed(self, rounds: int = 5, *, progress: bool = True) -> TimeRatio:
        """Time training steps of the scheduled and the original model in turns.

        The report shows the result afterwards. The model, its parameters and the random state do not change. The batch
        is the one passed to ``optimize``, so pass one of realistic size there.

        Args:
            rounds: how many steps of each.
            progress: show a progress bar in a terminal.

        Raises:
            NotApplicable: ``rounds`` is no number from 1; the model does not run, such as one on the meta device; or
                the report has none to time.
        """
        refuse_no_count("rounds is a number", rounds, 1, asked="time it", fix="timed(5), on the batch of optimize()")
        if self.time_ratio is None:
            raise _made_by_hand("timed")
        with in_progress(rounds, "timing training steps", progress) as advance:
            self.timing = self.time_ratio(rounds, advance)
        return self.timing

    def verify(
        self,
        batch: Any = None,
        steps: int = 5,
        *,
        training: bool = True,
        create_graph: bool | None = None,
        progress: bool = True,
    ) -> EquivalenceReport:
        """Compare the model with the original, as :func:`schedule.verify` does.

        The report shows the result afterwards.

        Args:
            batch: inputs of the model; if None, those it was optimized with.
            steps: optimizer steps for the comparison of updates.
            training: False to compare in eval mode and without gradients only.
            create_graph: whether to differentiate the norm of the gradient too; by default with ``steps=1``.
            progress: show a progress bar in a terminal.

        Raises:
            VerificationError: they differ.
            NotApplicable: the model is on the meta device, or the report is not about a schedule.
        """
        if self.schedule is None:
            raise _made_by_hand("verify")
        batch = self.schedule.tree.graphs.batch if batch is None else batch
        how: dict[str, Any] = {"training": training, "create_graph": create_graph, "progress": progress}
        verification = Verification(self.schedule, batch, steps, **how)
        with uncounted(self.model):
            return verification.check()

    @property
    def verified(self) -> EquivalenceReport | None:
        """The last comparison of the model with the original, by any ``verify``; None if steps followed, or none."""
        steps, result = (None if self.schedule is None else self.schedule.tree.verified) or ((), None)
        return result if self.schedule is not None and steps == self.schedule.history else None

    @property
    def internal_errors(self) -> list[str]:
        """Distinct errors of this package's own code, of scheduling and of calls since; the model ran without it."""
        running = [why for state in states_in(self.model) for why in state.internal_errors]
        running += [why for notes in self.declined.values() for why in notes if why.startswith(INTERNAL)]
        return list(headline.internal_errors(self.entries, running))

    @property
    def fallbacks(self) -> dict[str, int]:
        """Scheduled module → number of its calls run by the original forward so far."""
        return {path: state.fallbacks for path, state in self._states() if state.fallbacks}

    @property
    def falling_back(self) -> list[str]:
        """Scheduled modules whose last call ran the original forward."""
        return [path for path, state in self._states() if state.fallbacks and state.ran == "forward"]

    @property
    def active(self) -> int:
        """Number of matches in effect: those applied, except in modules that are :attr:`falling_back`."""
        idle = self.falling_back
        return sum(entry.count for entry in self.select(status="applied") if entry.path not in idle)

    @property
    def adapted(self) -> dict[str, list[str]]:
        """Scheduled module → further kinds of calls with graphs made since, and the rewrites in them."""
        return self._adaptations(lambda each: each.summary)

    @property
    def declined(self) -> dict[str, list[str]]:
        """Scheduled module → why calls of further kinds run its original forward."""
        return self._adaptations(lambda each: "" if each.specializations else each.declined.why)

    def _adaptations(self, text: Callable[[Adaptation], str]) -> dict[str, list[str]]:
        found = {path: [t for t in map(text, state.adaptations) if t] for path, state in self._states()}
        return {path: notes for path, notes in found.items() if notes}

    def _states(self) -> Iterator[tuple[str, ScheduledState]]:
        for path, module in self.model.named_modules():
            if (state := state_of(module)) is not None:
                yield path, state

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report as plain data, without running the model: costs are empty until measured."""
        return {
            "applied": self.applied,
            "entries": [asdict(entry) for entry in self.entries],
            "costs": {when: asdict(cost) for when, cost in self.measured.items()},
            "internal_errors": self.internal_errors,
            "unmeasured": self.unmeasured,
            "time": None if self.timing is None else asdict(self.timing),
            "verified": None if self.verified is None else self.verified.equal,
            "active": self.active,
            "fallbacks": self.fallbacks,
            "adapted": self.adapted,
            "declined": self.declined,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the whole report and pictures of the modules as one self-contained page.

        The graphs are drawn in this call. The bytes in them, and the costs if they were not yet, are measured: this
        runs training steps, see :meth:`measure`.

        Args:
            path: file to write the page to as well, atomically.

        Raises:
            NotApplicable: ``path`` cannot be written; checked before anything is drawn.
        """
        if path is not None:
            refuse_unwritable(Path(path), "report")
        self.measure_if_possible()
        pictures = "" if self.schedule is None else section(self.schedule, self.entries, self.timing)
        text = str(rendered("page.html", pictures=pictures, **self._values()))
        if path is not None:
            write(Path(path), text)
        return text

    def _repr_html_(self) -> str:
        return str(rendered("report.html", **self._values()))

    def _values(self) -> dict[str, Any]:
        """Return the values for the templates."""
        return {
            "model": type(self.model).__name__,
            "sentence": self.sentence,
            "figures": self.figures(),
            "facts": self.facts(),
            "details": self.details(),
            "rows": rows_of(self.entries),
        }

    def __rich__(self) -> RenderableType:
        figures = Table.grid(padding=(0, 2))
        for figure in self.figures():
            figures.add_row(figure.name, Text(figure.value, style=_STYLES[figure.tone]), Text(figure.note))
        title = Text(f"schedule.optimize: {type(self.model).__name__}", style="bold")
        parts: list[RenderableType] = [title, Text(self.sentence), "", figures, "", _pairs(self.facts())]
        if self.entries:
            parts += ["", _rules_table(self.entries)]
        details = [pair for pair in self.details() if pair[0] != ADAPTED]
        if adapted := self.adapted:
            kinds, modules = counted(sum(map(len, adapted.values())), "graph"), counted(len(adapted), "module")
            details.append((ADAPTED, f"{kinds} in {modules}: report.adapted"))
        if details:
            parts += ["", _pairs(details)]
        return Group(*parts)

    @property
    def sentence(self) -> str:
        """What was rewritten, and its effect on a training step if that was measured."""
        return headline.sentence(
            self.entries, self.measured, self.timing, self.internal_errors, self.count() - self.active
        )

    def figures(self) -> list[Figure]:
        """Return the four figures: rewrites, bytes kept for backward, time of a step, equality of results."""
        found = [
            headline.rewrites(self.entries, self.internal_errors, self.count() - self.active),
            headline.saved(self.measured, self.unmeasured, bool(self.count())),
            headline.step_time(self.timing, bool(self.count())),
            headline.verified(self.verified),
        ]
        return [replace(f, note=self.hints.get(f.name, f.note)) if f.is_hint else f for f in found]

    def facts(self) -> list[tuple[str, str]]:
        """Return the model, its weights and batch, and versions, as (name, text)."""
        graphs = None if self.schedule is None else self.schedule.tree.graphs
        return headline.facts(self.model, graphs and graphs.batch, graphs is not None and graphs.guessed)

    def details(self) -> list[tuple[str, str]]:
        """Return the dispatched operations, and how calls that differ from the recorded ones ran, as (name, text)."""
        found = self.calls()
        if {"before", "after"} <= self.measured.keys():
            before, after = self.measured["before"].dispatched, self.measured["after"].dispatched
            text = f"{before:,} → {after:,} ({headline.ratio_text(after, before)})"
            found.insert(0, ("dispatched operations", text))
        return found

    def calls(self) -> list[tuple[str, str]]:
        """Return how calls that differ from the recorded ones ran, as (description, modules)."""
        found = [("internal error", why) for why in self.internal_errors]
        fallbacks = self.fallbacks
        for count in sorted(set(fallbacks.values())):
            paths = paths_of(path for path, of_path in fallbacks.items() if of_path == count)
            found.append(("calls that ran the original forward", f"{count} of {paths}"))
        found += [(ADAPTED, line) for line in _by_text(self.adapted)]
        return found + [("no graph for other kinds of calls", line) for line in _by_text(self.declined)]

    def __str__(self) -> str:
        return printed(self, terminal_width())

    def __repr__(self) -> str:
        counts = [f"{count} {status}" for status in STATUSES if (count := self.count(status=status))]
        return f"Report({type(self.model).__name__}: {', '.join(counts) or 'nothing found'})"


def _pairs(pairs: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, text in pairs:
        grid.add_row(Text(name, style="dim"), Text(text))
    return grid


def _rules_table(entries: Sequence[Entry]) -> Table:
    rows = rows_of(entries)
    names = ["rule", "status", "matches", "modules", *(["why"] if any(row.reason for row in rows) else [])]
    table = Table()
    for name in names:
        table.add_column(name, justify="right" if name == "matches" else "left", overflow="fold")
    for row in rows:
        cells = (row.rule, row.status, str(row.matches), row.modules, row.reason)
        style = "bold red" if row.status == "internal error" else ""
        table.add_row(*map(Text, cells[: len(names)]), style=style)
    return table


def _made_by_hand(method: str) -> NotApplicable:
    return NotApplicable(
        "this report was not made by schedule.optimize",
        asked=f"Report.{method}",
        fix="report = schedule.optimize(model, batch)",
    )


def _by_text(table: dict[str, list[str]]) -> list[str]:
    """Return the distinct texts, each with its modules."""
    notes = dict.fromkeys(text for of_path in table.values() for text in of_path)
    return [f"{text} in {paths_of(path for path, own in table.items() if text in own)}" for text in notes]
