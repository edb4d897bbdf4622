"""Which primitive broke the model, by replaying the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import nn

from schedule.verify.equivalence import deviations_from
from schedule.verify.observe import Case, Observation
from schedule.verify.tolerances import Tolerance


class Step(Protocol):
    """One applied primitive."""

    @property
    def description(self) -> str:
        """What was done and where, such as ``fuse(bias_gelu) on transformer.h.0.mlp``."""


class Undoable(Protocol):
    """What verification needs of a schedule."""

    @property
    def module(self) -> nn.Module:
        """The root module."""

    @property
    def history(self) -> Sequence[Step]:
        """Applied steps, oldest first; undone ones are not among them."""

    def undo(self) -> object:
        """Revert the last step, bit-exactly."""

    def redo(self) -> object:
        """Apply the step undone last once more."""


@contextmanager
def undone(sch: Undoable, down_to: int = 0) -> Iterator[None]:
    """Inside, only the first ``down_to`` steps are applied; afterwards all that were, whatever happened."""
    count = len(sch.history)
    try:
        while len(sch.history) > down_to:
            sch.undo()
        yield
    finally:
        while len(sch.history) < count:
            sch.redo()


def first_failing_step(
    sch: Undoable,
    case: Case,
    reference: Observation,
    tolerance: Tolerance,
    agreed: Callable[[bool], bool] = bool,
) -> tuple[int, str] | None:
    """The last step before which the model still computed what the original does.

    Steps are undone one at a time until the model is equal again. Going backwards matters: a step that is
    wrong until another completes it (a shard before its sync) is passed over, where a search from the front
    would stop.

    Args:
        sch: the schedule.
        case: in which it differs.
        reference: what the original computes then.
        tolerance: what counts as equal.
        agreed: on several ranks, which must all call this: whether it is equal on all of them.

    Returns:
        the step's index and description; None if the model differs even with everything undone, which means
        that the original does not repeat itself.
    """
    steps = [step.description for step in sch.history]
    with undone(sch, len(steps)):
        for index in range(len(steps) - 1, -1, -1):
            sch.undo()
            if agreed(all(d.acceptable for d in deviations_from(reference, case, sch.module, tolerance))):
                return index, steps[index]
    return None
