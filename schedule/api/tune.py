"""``tune``: search for the fastest values of a schedule function's knobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule.api.schedule import Schedule, create_schedule
from schedule.tuning.measuring import TrainingStep
from schedule.tuning.result import Tuning
from schedule.tuning.space import Space
from schedule.tuning.tuner import Cost, Plan, Tuner, checked_bound, refuse_without_optuna
from schedule.util.arguments import keywords_checked
from schedule.util.wording import Bytes

if TYPE_CHECKING:
    from schedule.tuning.study import Sampler


@keywords_checked()
def tune(
    model: nn.Module | Schedule,
    plan: Plan,
    space: Mapping[str, Any],
    batch: Any = None,
    *,
    memory: Bytes | None = None,
    trials: int = 30,
    cost: Cost | None = None,
    storage: str | Path | None = None,
    name: str = "",
    seed: int = 0,
    sampler: Sampler | None = None,
    progress: bool = True,
) -> Tuning:
    """Search for the fastest knobs of a schedule function within a memory bound.

    ::

        def plan(sch, rules, every):
            if rules:
                sch.optimize(rules=rules)
            if every:
                sch["transformer.h.*"].checkpoint(every=every)

        space = {"rules": [None, "default", "memory"], "every": [0, 4, 3, 2, 1], "micro_batch": [1, 2, 4, 8]}
        tuning = schedule.tune(model, plan, space, batch, memory=200_000_000)
        tuning.apply(model)

    Each trial applies ``plan`` to the model, measures a step, and always restores the model bit for bit. A trial that
    raises is recorded with its reason, a trial over the bound is timed once, a trial outpaced by others ends early, and
    no point is measured twice. Ctrl-C ends the search with the results so far.

    Args:
        model: the model to tune, or a schedule of it; the steps of that schedule are preserved.
        plan: function of a schedule and knobs by name.
        space: knob → list of values, :func:`choice`, :func:`number` or :func:`splits`. Each is a parameter of ``plan``,
            of ``cost``, or of both.
        batch: as for :func:`create_schedule`, with the sizes that the model will run at.
        memory: maximum bytes of a step, as measured by ``cost``: a number, or ``"24GB"``; None for no bound.
        trials: total number of trials, including those already in ``storage``.
        cost: function of the schedule and, if it has such parameters, knobs by name and ``watch``
            (:class:`~schedule.tuning.Watch`); returns a time, ``(time, bytes)`` or :class:`~schedule.tuning.Measured`.
            By default :class:`~schedule.tuning.TrainingStep`, with knobs ``micro_batch`` and ``compiled``.
        storage: a file that stores the trials, so that a later call continues the search: a journal, or an SQLite
            database if the name ends in ``.db``; or optuna's URL of a database.
        name: name of the search in ``storage``; by default made from the model and the plan.
        seed: the same seed and the same costs give the same trials.
        sampler: function of a seed that creates an optuna sampler (``TPESampler``); by default
            :mod:`schedule.tuning.surrogate` searches.
        progress: show a progress bar in a terminal.

    Raises:
        NotApplicable: optuna is missing, the space is empty or wrong, a knob is a parameter of neither function, the
            storage belongs to another search, or there is a bound but ``cost`` measures no memory.
    """
    refuse_without_optuna()
    sch = model if isinstance(model, Schedule) else create_schedule(model, batch)
    sch.tree.use_batch(batch)
    tuner = Tuner(sch, plan, Space(space), cost or TrainingStep(), checked_bound(memory, trials), create_schedule)
    return tuner.search(tuner.study(storage, name, seed, sampler), trials, progress)
