"""Comparison of training steps, in cost and time, with and without the last steps of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from schedule.distributed.tensor_parallel.sharded_modules import is_sharded
from schedule.report.costs import Cost, TimeRatio, measure, step_seconds
from schedule.util.errors import NotApplicable
from schedule.util.user_code import UserCodeError, user_code
from schedule.verify.bisection import undone

if TYPE_CHECKING:
    from schedule.core.node import Node


def costs_since(top: Node, batch: Any, steps_before: int) -> dict[str, Cost]:
    """Measure the cost of a training step before and after the steps from ``steps_before`` on.

    Raises:
        NotApplicable: the model does not run here, or does not train on ``batch``.
    """
    refuse_without_data(top)
    refuse_sharded(top)
    with trains():
        after = measure(top.module, batch)
        if len(top.history) <= steps_before:
            return {"before": after, "after": after}
        with undone(top, steps_before):
            before = measure(top.module, batch)
    return {"before": before, "after": after}


def ratio_since(top: Node, batch: Any, steps_before: int, rounds: int, advance: Callable[[], None]) -> TimeRatio:
    """Measure the time of a training step relative to one without the steps from ``steps_before`` on.

    All ranks must call it together. ``advance`` is called after each round.

    Raises:
        NotApplicable: the model does not run here, or does not train on ``batch``.
    """
    refuse_without_data(top)
    after, before = [], []
    with trains():
        for _ in range(rounds):
            after.append(step_seconds(top.module, batch))
            with undone(top, steps_before):
                before.append(step_seconds(top.module, batch))
            advance()
    return TimeRatio.of(after, before)


@contextmanager
def trains() -> Iterator[None]:
    """Convert any error of a training step into :class:`NotApplicable`."""
    try:
        with user_code():
            yield
    except UserCodeError as failed:  # a batch that evaluates need not train
        raise NotApplicable(
            f"the model does not train on its example inputs: {failed}",
            asked="measure a training step",
            fix="give optimize() a batch that model.train() accepts, with labels where it asks for them",
        ) from failed.error


def refuse_sharded(top: Node) -> None:
    """Raise if the model is sharded.

    A report is read on one rank, and a training step there would wait forever for the others.
    """
    if is_sharded(top.module):
        raise NotApplicable(
            "the model is sharded over ranks, which would have to run together",
            asked="measure a training step",
            fix="on all ranks: schedule.report.costs.measure(model, batch)",
        )


def refuse_without_data(top: Node) -> None:
    """Raise if the model is on the meta device, where it does not run."""
    if any(parameter.is_meta for parameter in top.module.parameters()):
        raise NotApplicable(
            "a model on the meta device does not run, so there is nothing to measure",
            asked="measure a training step",
            fix="build(sch, init_weights=…) first, then optimize",
        )
