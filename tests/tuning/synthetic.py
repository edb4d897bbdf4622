"""A search whose costs are made up: the same everywhere, at once."""

from __future__ import annotations

from typing import Any

import schedule
from schedule.tuning import Watch
from tests.small import ids, small

SPACE: dict[str, Any] = {
    "decay": ["none", "mlp", "typo"],
    "every": [0, 2, 1],
    "rows": [1, 2, 4, 8],
}


def plan(sch: schedule.Schedule, decay: str, every: int) -> None:
    """Tags and recomputes; one of the modules that it may tag does not exist."""
    if decay != "none":
        sch[f"blocks.*.{decay}.fc1"].annotate("weight", "decay", 0.0)
    if every:
        sch["blocks.*"].checkpoint(every=every)


def plan_nothing(sch: schedule.Schedule) -> None:
    """No steps."""


def cost(sch: schedule.Schedule, decay: str, every: int, rows: int) -> tuple[float, int]:
    """Recomputing and small parts take time; keeping takes memory."""
    time = {0: 1.0, 2: 1.2, 1: 1.5}[every] * (1 + 0.3 / rows) * {"none": 1.0, "mlp": 0.8}[decay]
    return time, {0: 100, 2: 60, 1: 30}[every] * rows


def tuned(**given: Any) -> schedule.Tuning:
    """``tune`` on the small model with all of that, unless ``given``."""
    wanted: dict[str, Any] = {"plan": plan, "space": SPACE, "cost": cost, "batch": ids(), "progress": False, **given}
    return schedule.tune(wanted.pop("model", None) or small(), **wanted)


def points(tuning: schedule.Tuning) -> list[Any]:
    """What was tried and what came of it, for comparisons."""
    return [(trial.number, trial.knobs, trial.status, trial.time, trial.memory) for trial in tuning.trials]


def watching(sch: schedule.Schedule, watch: Watch, every: int, rows: int) -> schedule.tuning.Measured:
    """The same cost, told bit by bit, as one that measures would."""
    time, memory = cost(sch, "none", every, rows)
    watch.memory(memory)
    for _ in range(3):
        watch.time(time)
    return schedule.tuning.Measured(time, memory)
