"""One point of a search, with its result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from schedule.recipes.recipe import Recipe
from schedule.tuning.space import Knobs, text_of

Status = Literal["measured", "over the bound", "pruned", "failed"]
STATUSES: tuple[Status, ...] = ("measured", "pruned", "over the bound", "failed")


@dataclass(frozen=True)
class Trial:
    """One point of the space, with its result.

    Attributes:
        number: in the order of the search.
        knobs: name → value; None for knobs that did not matter.
        status: ``measured``; ``over the bound``, timed only once; ``pruned``, if others were faster; ``failed``.
        time: of a step; if not measured to the end, the last estimate. None if it was not timed.
        memory: bytes; None if it was not measured.
        reason: for not measuring to the end, "" if measured.
        recipe: the steps as data; None if there are none or they cannot be serialized.
    """

    number: int
    knobs: Knobs
    status: Status
    time: float | None = None
    memory: int | None = None
    reason: str = ""
    recipe: Recipe | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """Knobs on one line, without those of no effect."""
        return labeled(self.knobs)

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as plain data."""
        plain = {name: _plain(value) for name, value in self.knobs.items()}
        told = {"number": self.number, "knobs": plain, "status": self.status, "time": self.time}
        return {**told, "memory": self.memory, "reason": self.reason}


def pareto(trials: Iterable[Trial]) -> list[Trial]:
    """Return the Pareto front in time and memory of the trials with both, sorted by memory."""
    front: list[Trial] = []
    placed = [trial for trial in trials if trial.time is not None and trial.memory is not None]
    for trial in sorted(placed, key=lambda t: (t.memory, t.time)):
        if not front or (trial.time or 0.0) < (front[-1].time or 0.0):
            front.append(trial)
    return front


def labeled(knobs: Knobs) -> str:
    """Format knobs on one line, without those of no effect."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in knobs.items() if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else text_of(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else text_of(value)
