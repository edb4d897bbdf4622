"""Result of a search."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text
from torch import nn

from schedule.core.node import Node
from schedule.recipes.recipe import Recipe
from schedule.tuning.plotting import plot
from schedule.tuning.space import Knobs
from schedule.tuning.trial import STATUSES, Status, Trial, pareto
from schedule.util.arguments import keywords_checked
from schedule.util.errors import NotApplicable, RecipeError
from schedule.util.printing import printed
from schedule.util.templating import rendered
from schedule.util.wording import size_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Create = Callable[[nn.Module, Any], Any]
"""Creates the schedule of a model and its example inputs."""


@dataclass(frozen=True)
class Row:
    """One trial as a row of a table.

    Attributes:
        kind: ``best``, ``measured`` or ``other``.
        said: the status, and the reason for not measuring to the end.
    """

    number: int
    knobs: str
    time: str
    memory: str
    said: str
    kind: str


@dataclass(frozen=True, repr=False)
class Tuning:
    """Result of :func:`schedule.tune`, printed as a table, also in a notebook.

    Attributes:
        trials: in the order of the search.
        bound: bytes that a step may need; None for no bound.
        of: the model and the schedule function that were tuned.
        plan: the schedule function, wrapped to take a schedule and the knobs.
        stopped: whether the search was interrupted.
        create: creates the schedule of a model and its example inputs.
    """

    trials: Sequence[Trial]
    bound: int | None = None
    of: str = ""
    plan: Callable[[Any, Knobs], Any] | None = None
    stopped: bool = False
    create: Create | None = None

    def select(self, status: Status) -> list[Trial]:
        """Return the trials with this status."""
        return [trial for trial in self.trials if trial.status == status]

    @property
    def best(self) -> Trial:
        """The fastest trial within the bound.

        Raises:
            NotApplicable: there is none; the message has the least memory seen, or the reason of failed trials.
        """
        measured = self.select("measured")
        if not measured:
            raise self._nothing()
        return min(measured, key=lambda trial: (trial.time, trial.number))

    def _nothing(self) -> NotApplicable:
        over = [trial for trial in self.select("over the bound") if trial.memory is not None]
        if over and self.bound is not None:
            least = min(over, key=lambda trial: trial.memory or 0)
            return NotApplicable(
                f"none of {len(self.trials)} trials needs at most {self.bound:,} bytes: the least was "
                f"{least.memory:,}, in trial {least.number}: {least.label}",
                fix=f"memory={least.memory} or more, more trials, or knobs that save more",
            )
        if not self.trials:
            return NotApplicable("no trial came to an end", fix="tune again, with the same storage to go on")
        reason, count = Counter(trial.reason for trial in self.trials).most_common(1)[0]
        return NotApplicable(
            f"all {len(self.trials)} trials failed, {count} of them so: {reason}",
            fix="call the schedule function yourself to see where it raises",
        )

    @property
    def front(self) -> list[Trial]:
        """Pareto front of the trials in time and memory, sorted by memory."""
        return pareto(self.trials)

    @property
    def recipe(self) -> Recipe:
        """Steps of the best trial, for :func:`schedule.replay`, ``to_json`` and ``to_python``.

        Raises:
            RecipeError: the steps cannot be serialized.
            NotApplicable: as for :attr:`best`.
        """
        best = self.best
        if best.recipe is None:
            raise RecipeError(
                f"the steps of trial {best.number} cannot be written down",
                fix="tuning.apply(model), or a plan without lambdas and modules with weights",
            )
        return best.recipe

    @keywords_checked(example_inputs="batch")
    def apply(self, model: nn.Module | Node, batch: Any = None) -> Any:
        """Schedule ``model`` by the plan with the best knobs.

        Knobs of the training step (``micro_batch``) are left to the caller.

        Args:
            model: the tuned model, another one of the same architecture, or a schedule of it.
            batch: of a model, as for :func:`schedule.create_schedule`.

        Raises:
            NotApplicable: as for :attr:`best`.
            ScheduleError: the plan does not apply to this model.
        """
        best = self.best
        if self.plan is None or self.create is None:
            raise NotApplicable("this result has no plan", fix="schedule.replay(model, tuning.recipe)")
        sch = model.root if isinstance(model, Node) else self.create(model, batch)
        self.plan(sch, best.knobs)
        return sch

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        best = self.best if self.select("measured") else None
        return {
            "of": self.of,
            "bound": self.bound,
            "best": None if best is None else best.number,
            "recipe": None if best is None or best.recipe is None else json.loads(best.recipe.to_json()),
            "trials": [trial.to_dict() for trial in self.trials],
        }

    def to_json(self, indent: int | None = 1) -> str:
        """Return the result of :meth:`to_dict` as a JSON string."""
        return json.dumps(self.to_dict(), indent=indent)

    def plot(self, path: str | Path | None = None, marks: Mapping[str, Mapping[str, Any]] | None = None) -> Figure:
        """Plot time against memory of every trial, with the bound and the Pareto front.

        Args:
            path: file for the picture, PNG, SVG or PDF by its suffix; None to save nothing.
            marks: label → knobs of a trial that gets that label.

        Raises:
            NotApplicable: matplotlib is missing, or no trial has both a time and a memory.
        """
        best = self.best if self.select("measured") else None
        return plot(self.trials, best, self.bound, f"{self.of}: {self.summary()}", path, marks or {})

    def summary(self) -> str:
        """Return a summary on one line."""
        counts = ", ".join(f"{len(own)} {status}" for status in STATUSES if (own := self.select(status)))
        bound = "" if self.bound is None else f"; at most {size_text(self.bound)}"
        return f"{len(self.trials)} trials: {counts or 'none'}{bound}{'; interrupted' if self.stopped else ''}"

    def rows(self) -> list[Row]:
        """Return one row per trial, the fastest within the bound first."""
        order = {status: position for position, status in enumerate(STATUSES)}
        trials = sorted(self.trials, key=lambda t: (order[t.status], t.time or 0.0, t.memory or 0, t.number))
        best = self.best if self.select("measured") else None
        return [_row(trial, trial is best) for trial in trials]

    def __rich__(self) -> Table:
        table = Table(title=Text(f"schedule.tune: {self.of}"), title_justify="left", caption_justify="left")
        for name in ("trial", "knobs", "time", "memory", ""):
            table.add_column(name, justify="right" if name in ("trial", "time", "memory") else "left", overflow="fold")
        for row in self.rows():
            style = {"best": "bold", "other": "dim"}.get(row.kind, "")
            table.add_row(*map(Text, (str(row.number), row.knobs, row.time, row.memory, row.said)), style=style)
        table.caption = Text(self.summary())
        return table

    def __str__(self) -> str:
        return printed(self.__rich__()).rstrip()

    def __repr__(self) -> str:
        return f"Tuning({self.of}: {self.summary()})"

    def _repr_html_(self) -> str:
        return str(rendered("tuning.html", of=self.of, summary=self.summary(), rows=self.rows()))


def _row(trial: Trial, best: bool) -> Row:
    time = "–" if trial.time is None else f"{'' if trial.status == 'measured' else '~'}{trial.time:.3g}"
    memory = "–" if trial.memory is None else size_text(trial.memory)
    said = "best" if best else f"{trial.status}: {trial.reason}" if trial.reason else trial.status
    kind = "best" if best else "measured" if trial.status == "measured" else "other"
    return Row(trial.number, trial.label, time, memory, said, kind)
