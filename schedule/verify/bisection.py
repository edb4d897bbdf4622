"""Bisection: search for the first failing step by replaying the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schedule.core.node import Node
from schedule.verify.equivalence import deviations_from
from schedule.verify.observe import Case, Observation
from schedule.verify.tolerances import Tolerance


@contextmanager
def undone(sch: Node, down_to: int = 0) -> Iterator[None]:
    """Undo all steps except the first ``down_to``, and redo them on exit, also after an error."""
    count = len(sch.history)
    try:
        while len(sch.history) > down_to:
            sch.undo()
        yield
    finally:
        while len(sch.history) < count:
            sch.redo()


def first_failing_step(
    sch: Node,
    case: Case,
    reference: Observation,
    tolerance: Tolerance,
    agreed: Callable[[bool], bool] = bool,
) -> tuple[int, str] | None:
    """Find the first failing step: the step right after the last correct state of the model.

    Steps are undone one at a time until the model is equal again. Going backwards matters: a step that is wrong
    until a later one completes it (a shard before its sync) is skipped, while a search from the front would stop
    there.

    Args:
        sch: the schedule.
        case: the case in which the model differs.
        reference: the observation of the original in that case.
        tolerance: what counts as equal.
        agreed: on several ranks, which must all call this: whether the model is equal on all of them.

    Returns:
        the step's index and description; None if the model differs even with everything undone, which means
        that the original is not reproducible.
    """
    steps = [step.description for step in sch.history]
    with undone(sch, len(steps)):
        for index in range(len(steps) - 1, -1, -1):
            sch.undo()
            if agreed(all(d.acceptable for d in deviations_from(reference, case, sch.module, tolerance))):
                return index, steps[index]
    return None
