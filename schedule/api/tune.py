"""``tune``: the values of a schedule function's knobs that make a step fastest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule.api.schedule import Schedule, create_schedule
from schedule.capture.examples import example_inputs
from schedule.tuning.measuring import TrainingStep
from schedule.tuning.result import Tuning
from schedule.tuning.space import Space
from schedule.tuning.tuner import Cost, Plan, Tuner, checked_bound, refuse_without_optuna

if TYPE_CHECKING:
    from schedule.tuning.study import Sampler


def tune(
    model: nn.Module | Schedule,
    plan: Plan,
    space: Mapping[str, Any],
    batch: Any = None,
    *,
    memory: int | None = None,
    trials: int = 30,
    cost: Cost | None = None,
    storage: str | Path | None = None,
    name: str = "",
    seed: int = 0,
    sampler: Sampler | None = None,
    progress: bool = True,
) -> Tuning:
    """Search for the knobs of a schedule function that make a step fastest within a memory bound.

    ::

        def plan(sch, rules, every):
            if rules:
                sch.optimize(rules=rules)
            if every:
                sch["transformer.h.*"].checkpoint(every=every)

        space = {"rules": [None, "default", "memory"], "every": [0, 4, 3, 2, 1], "micro_batch": [1, 2, 4, 8]}
        tuning = schedule.tune(model, plan, space, batch, memory=200_000_000)
        tuning.apply(model)

    Each trial applies ``plan`` to the model, measures, and takes all of it back to the bit, whatever happened. A trial
    that raises is recorded with its reason, one over the bound is timed once, one that others have outpaced ends early,
    and no point is measured twice. Ctrl-C ends the search with what was found so far.

    Args:
        model: what is tuned, or a schedule of it, whose steps stay.
        plan: takes a schedule and knobs by name.
        space: knob → list of values, :func:`choice`, :func:`number` or :func:`splits`. Each is a parameter of ``plan``,
            of ``cost``, or of both.
        batch: as for :func:`create_schedule`, of the sizes that the model will run at.
        memory: bytes that a step may need, as ``cost`` measures them; None for no bound.
        trials: how many in all, with those that ``storage`` has already.
        cost: takes the schedule and, if it has such parameters, knobs by name and ``watch``
            (:class:`~schedule.tuning.Watch`); returns a time, ``(time, bytes)`` or :class:`~schedule.tuning.Measured`.
            By default :class:`~schedule.tuning.TrainingStep`, with knobs ``micro_batch`` and ``compiled``.
        storage: a file that keeps the trials, so that the search goes on there when it is called again: a journal, or
            a database of SQLite if it ends in ``.db``; or optuna's URL of a database.
        name: of the search in ``storage``; by default of the model and the plan.
        seed: the same seed and the same costs give the same trials.
        sampler: makes one of optuna's from a seed (``TPESampler``); else :mod:`schedule.tuning.surrogate` searches.
        progress: shows a bar, in a terminal.

    Raises:
        NotApplicable: optuna is missing, the space is empty or wrong, nobody takes a knob, the storage is of another
            search, or there is a bound and ``cost`` measures no memory.
    """
    refuse_without_optuna()
    sch = model if isinstance(model, Schedule) else create_schedule(model, batch)
    graphs = sch.tree.graphs
    if batch is not None or graphs.example_inputs is None:
        graphs.example_inputs = example_inputs(sch.tree.root) if batch is None else batch
    tuner = Tuner(sch, plan, Space(space), cost or TrainingStep(), checked_bound(memory, trials), create_schedule)
    return tuner.search(tuner.study(storage, name, seed, sampler), trials, progress)
