"""What a trial costs: a measured training step, and how a cost function says so while it measures."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from schedule.capture.recording.structure import map_structure
from schedule.core.node import Node
from schedule.report.costs import step_peak, step_seconds
from schedule.util.errors import NotApplicable
from schedule.util.named_values import named_tensors


@dataclass(frozen=True)
class Measured:
    """What a cost function returns.

    Attributes:
        time: of a step, in any unit; the smaller, the better.
        memory: bytes; None if it was not measured, which is an error where there is a bound.
    """

    time: float
    memory: int | None = None


class Ended(Exception):
    """A trial that need not go on.

    Args:
        status: what it is then.
        reason: for the reader.
    """

    def __init__(self, status: Literal["over the bound", "pruned"], reason: str) -> None:
        super().__init__(reason)
        self.status: Literal["over the bound", "pruned"] = status
        self.reason = reason


class Watch:
    """What a cost function that has a parameter ``watch`` tells while it measures, so that a bad trial ends early.

    Args:
        bound: bytes; None for no bound.
        outpaced: takes the time so far; whether the trial may end there.
        original: inside, the model is as it was before the trial.
    """

    def __init__(
        self,
        bound: int | None,
        outpaced: Callable[[float], bool],
        original: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.bound, self._outpaced, self.original = bound, outpaced, original
        self.seen_memory: int | None = None
        self.seen_time: float | None = None

    def memory(self, memory: int) -> None:
        """The step needs ``memory`` bytes; a trial over the bound ends with its first time."""
        self.seen_memory = memory

    def time(self, so_far: float) -> None:
        """The step takes ``so_far``, as it looks now; one over the bound or that others have outpaced ends here."""
        self.seen_time = so_far
        self.end_over_bound()
        if self._outpaced(so_far):
            raise Ended("pruned", "slower than most at this point")

    def end_over_bound(self) -> None:
        """End a trial that is over the bound: its time is known, which says what its knobs do elsewhere."""
        if self.bound is not None and self.seen_memory is not None and self.seen_memory > self.bound:
            over = self.seen_memory - self.bound
            raise Ended("over the bound", f"{self.seen_memory:,} bytes, {over:,} more than allowed")


class TrainingStep:
    """The cost of a training step without the optimizer's: its time over that of the original model, and peak memory.

    Memory comes first and is counted: all that is allocated during forward and backward, gradients included, beyond
    what is there before. Then the step and that of the original model are timed in turns; the time is the median
    of the rounds' ratios; over the bound there is one round. The model, its parameters, gradients and the random
    state stay as they are.

    A model whose step does not fit is its own reference in as large parts of the batch as do.

    Args:
        rounds: how often both are timed.
        clock: what counts the seconds; on a machine without an accelerator that others use too, ``time.process_time``
            does not count theirs.
    """

    def __init__(self, rounds: int = 5, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rounds, self.clock = rounds, clock
        self._reference: list[Any] = []

    def __call__(self, sch: Node, watch: Watch, micro_batch: int | None = None, compiled: bool = False) -> Measured:
        """Measure.

        Args:
            sch: with the trial's steps applied.
            watch: told the memory, then the time after each round.
            micro_batch: rows of the batch that run at a time, their gradients added up; None for all.
            compiled: through ``torch.compile``, as a copy, for which there must be memory.

        Raises:
            NotApplicable: the batch has fewer rows, or the model is on the meta device.
        """
        model, batch = sch.module, sch.tree.graphs.example_inputs
        if any(parameter.is_meta for parameter in model.parameters()):
            raise NotApplicable("a model on the meta device does not run", fix="give tune() a cost of your own")
        parts = split(batch, micro_batch)
        run: Any = torch.compile(copy.deepcopy(model)) if compiled else model
        with _compiling_afresh() if compiled else nullcontext():
            memory = step_peak(run, *parts)
            watch.memory(memory)
            ratios: list[float] = []
            for _ in range(self.rounds):
                seconds = step_seconds(run, *parts, clock=self.clock)
                with watch.original():
                    ratios.append(seconds / self._original_seconds(sch.module, batch))
                watch.time(statistics.median(ratios))
        return Measured(statistics.median(ratios), memory)

    def _original_seconds(self, model: nn.Module, batch: Any) -> float:
        if not self._reference:
            self._reference = split(batch, _rows_that_fit(model, batch))
        return step_seconds(model, *self._reference, clock=self.clock)


def _compiling_afresh() -> AbstractContextManager[None]:
    """Inside, torch.compile does not give up because earlier trials compiled the same forwards."""
    from fused.torch_internals.compiler import many_recompilations  # takes seconds

    return many_recompilations()


def _rows_that_fit(model: nn.Module, batch: Any) -> int:
    """How many rows of ``batch`` can be run at a time: all, or half as many until it goes."""
    rows = rows_of(batch)
    while rows > 1:
        try:
            step_seconds(model, *split(batch, rows))
        except (RuntimeError, MemoryError):
            rows = (rows + 1) // 2
        else:
            break
    return rows


def rows_of(batch: Any) -> int:
    """How many rows a batch has: the first size of its first tensor."""
    return next((tensor.shape[0] for tensor in named_tensors(batch).values() if tensor.ndim), 1)


def split(batch: Any, micro_batch: int | None) -> list[Any]:
    """``batch`` in parts of ``micro_batch`` rows; tensors that have another number of rows go to each part.

    Raises:
        NotApplicable: the batch has fewer rows.
    """
    rows = rows_of(batch)
    if micro_batch is None or micro_batch == rows:
        return [batch]
    if not 1 <= micro_batch <= rows:
        raise NotApplicable(
            f"the batch has {rows} rows, which do not make parts of {micro_batch}", fix=f"micro_batch from 1 to {rows}"
        )

    def part(value: Any, start: int) -> Any:
        own = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == rows
        return value[start : start + micro_batch] if own else value

    given = dict(batch) if isinstance(batch, Mapping) else batch
    return [map_structure(given, partial(part, start=start)) for start in range(0, rows, micro_batch)]
