"""One point of a search, and what came of it."""

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
    """One point of the space.

    Attributes:
        number: in the order of the search.
        knobs: name → value; None for those that did not matter.
        status: ``measured``; ``over the bound``, which is timed once; ``pruned``, when others were faster; ``failed``.
        time: of a step; of one that was not measured to the end, as it looked then. None if it was not timed.
        memory: bytes; None if it was not measured.
        reason: why it was not measured to the end, "" if it was.
        recipe: the steps as data; None if there are none or they cannot be written down.
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
        """The knobs that mattered, on one line."""
        return labeled(self.knobs)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        plain = {name: _plain(value) for name, value in self.knobs.items()}
        told = {"number": self.number, "knobs": plain, "status": self.status, "time": self.time}
        return {**told, "memory": self.memory, "reason": self.reason}


def pareto(trials: Iterable[Trial]) -> list[Trial]:
    """Those with a time and a memory that no other beats in both, by memory."""
    front: list[Trial] = []
    placed = [trial for trial in trials if trial.time is not None and trial.memory is not None]
    for trial in sorted(placed, key=lambda t: (t.memory, t.time)):
        if not front or (trial.time or 0.0) < (front[-1].time or 0.0):
            front.append(trial)
    return front


def labeled(knobs: Knobs) -> str:
    """Knobs on one line, without those that do not matter."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in knobs.items() if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else text_of(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else text_of(value)
