"""Search over the values of a schedule function's knobs, with a measurement of each trial."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from schedule.core.node import Node
from schedule.recipes.building import original_name, recipe_of
from schedule.recipes.recipe import Recipe
from schedule.tuning.measuring import Ended, Measured, Watch
from schedule.tuning.result import Create, Tuning
from schedule.tuning.space import Knobs, Space, text_of
from schedule.tuning.trial import Status, Trial, labeled
from schedule.util.arguments import refuse_no_count
from schedule.util.errors import NotApplicable, RecipeError, ScheduleError
from schedule.util.named_values import shapes_of
from schedule.util.printing import alone
from schedule.util.wording import Bytes, bytes_of, size_text
from schedule.verify.bisection import undone

if TYPE_CHECKING:
    from schedule.tuning.study import Asked, Sampler, Study

Plan = Callable[..., Any]
Cost = Callable[..., Any]

FAILURES = (
    ScheduleError,
    RuntimeError,
    MemoryError,
    ValueError,
    TypeError,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
)
"""Errors of a trial that are recorded, with the search continuing."""


def refuse_without_optuna() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise NotApplicable("tuning needs optuna, which is not installed", fix="pip install optuna")


def checked_bound(memory: Bytes | None, trials: int) -> int | None:
    """Return the number of bytes that ``memory`` means, after a check of both arguments."""
    refuse_no_count("trials is a whole number", trials, 1, asked="tune", fix="trials=20, say")
    bound = None if memory is None else bytes_of(memory)
    if memory is not None and (bound is None or bound < 1):
        raise NotApplicable(f"memory is a number of bytes, not {memory!r}", asked="tune", fix='memory="24GB", say')
    return bound


class Tuner:
    """One search, with the model, the schedule function and the cost function.

    Args:
        sch: the schedule of the model, with the inputs to measure it on.
        plan: takes a schedule and knobs by name.
        space: the knobs.
        cost: as for :func:`schedule.tune`.
        bound: bytes that a step may need; None for no bound.
        create: creates the schedule of a model, for :meth:`Tuning.apply`.
    """

    def __init__(self, sch: Node, plan: Plan, space: Space, cost: Cost, bound: int | None, create: Create) -> None:
        self.sch, self.plan, self.space, self.cost, self.bound, self.create = sch, plan, space, cost, bound, create
        taken = _parameters(plan) | _parameters(cost)
        for knob in space.knobs:
            if knob == "watch" or (knob not in taken and "**" not in taken):
                raise NotApplicable(
                    f"neither {text_of(plan)} nor the cost takes a knob named {knob!r}",
                    fix=f"give one of them a parameter {knob}, or leave it out of the space",
                )

    def study(self, storage: str | Path | None, name: str, seed: int, sampler: Sampler | None) -> Study:
        from schedule.tuning.study import Study

        about = {"space": self.space.describe(), "bound": self.bound, "cost": _named(self.cost)}
        about["batch"] = shapes_of(self.sch.tree.graphs.batch)
        about["parameters"] = sum(parameter.numel() for parameter in self.sch.tree.root.parameters())
        return Study(self.space, storage, name or self.title, about, seed, sampler)

    @property
    def title(self) -> str:
        return f"{original_name(self.sch.tree.root)} by {_named(self.plan)}"

    def search(self, study: Study, trials: int, progress: bool) -> Tuning:
        stopped = False
        with _Bar(trials) if progress else nullcontext() as bar:
            try:
                for asked in study.proposals(trials):
                    self.tried(study, asked)
                    if bar is not None:
                        bar.show(self.result(study))
            except KeyboardInterrupt:
                stopped = True
        return self.result(study, stopped)

    def result(self, study: Study, stopped: bool = False) -> Tuning:
        return Tuning(study.trials, self.bound, self.title, partial(_called, self.plan), stopped, self.create)

    def tried(self, study: Study, asked: Asked) -> None:
        """Run one trial and store its result."""
        complete = False
        try:
            trial = self.trial(len(study.trials), asked)
            complete = True
        finally:
            if not complete:
                study.drop(asked)
        over = 0.0 if self.bound is None or trial.memory is None else trial.memory / self.bound - 1.0
        study.tell(asked, trial, over)

    def trial(self, number: int, asked: Asked) -> Trial:
        before = len(self.sch.history)
        watch = Watch(self.bound, asked.outpaced, lambda: undone(self.sch, before))
        recipe: Recipe | None = None
        status: Status = "measured"
        reason = ""
        try:
            with self.taken_back():
                _called(self.plan, self.sch, asked.knobs)
                recipe = self.recipe()
                measured = self.measured(asked.knobs, watch)
                watch.seen_time = measured.time
                if measured.memory is not None:
                    watch.memory(measured.memory)
                watch.end_over_bound()
        except Ended as ended:
            status, reason = ended.status, ended.reason
        except FAILURES as error:
            status, reason = "failed", _reason(error)
        if status == "failed" and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if status == "measured" and watch.seen_memory is None and self.bound is not None:
            raise NotApplicable(
                f"there is a bound of {self.bound:,} bytes, and the cost measures no memory",
                fix="return (time, bytes) from it, or leave memory= out",
            )
        time = None if status == "failed" else watch.seen_time
        return Trial(number, asked.knobs, status, time, watch.seen_memory, reason, recipe)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Roll back all steps made in the block at its end, also on error."""
        with suppress(_Over), self.sch.tree.history.all_or_nothing():
            yield
            raise _Over

    def recipe(self) -> Recipe | None:
        try:
            return recipe_of(self.sch.tree)
        except RecipeError:
            return None

    def measured(self, knobs: Knobs, watch: Watch) -> Measured:
        told = {"watch": watch} if "watch" in _parameters(self.cost) else {}
        found = _called(self.cost, self.sch, {**knobs, **told})
        if isinstance(found, tuple) and len(found) == 2:
            found = Measured(*found)
        elif not isinstance(found, Measured):
            found = Measured(found)
        if isinstance(found.time, bool) or not isinstance(found.time, int | float) or not math.isfinite(found.time):
            raise ValueError(f"the cost is {found.time!r}, which is not a time")
        return found


class _Over(Exception):
    """Raised at the end of a trial to roll back its steps."""


class _Bar:
    """Progress in a terminal."""

    def __init__(self, trials: int) -> None:
        console = Console(stderr=True)
        self.alone = alone()
        columns = (
            TextColumn("tuning"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=trials)

    def __enter__(self) -> _Bar:
        self.alone.__enter__()
        self.bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bar.stop()
        self.alone.__exit__(None, None, None)

    def show(self, result: Tuning) -> None:
        measured = result.select("measured")
        best = result.best if measured else None
        said = "nothing within the bound yet"
        if best is not None:
            memory = "" if best.memory is None else f", {size_text(best.memory)}"
            said = f"best {best.time:.3g}{memory}: {labeled(best.knobs)}"
        self.bar.update(self.task, completed=len(result.trials), description=said)


def _parameters(function: Callable[..., Any]) -> set[str]:
    """Return the parameter names of ``function`` after the schedule, with ``**`` if it takes any name."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {"**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def _called(function: Callable[..., Any], sch: Node, knobs: Knobs) -> Any:
    taken = _parameters(function)
    return function(sch, **{name: value for name, value in knobs.items() if name in taken or "**" in taken})


def _named(function: Any) -> str:
    """Return the name of a function, or of the class of a callable, without its module."""
    return getattr(function, "__name__", type(function).__name__)


def _reason(error: Exception) -> str:
    """Return the reason for a failed trial on one line."""
    text = error.why if isinstance(error, ScheduleError) else str(error)
    return f"{type(error).__name__}: {text.strip().splitlines()[0]}" if text.strip() else type(error).__name__
