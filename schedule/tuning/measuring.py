"""Cost of a trial: a measured training step, and the interface to report measurements in progress."""

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

from schedule.capture import map_structure
from schedule.core.node import Node
from schedule.report.costs import step_peak, step_seconds
from schedule.util.errors import NotApplicable
from schedule.util.named_values import named_tensors


@dataclass(frozen=True)
class Measured:
    """Result of a cost function.

    Attributes:
        time: of a step, in any unit; the smaller, the better.
        memory: bytes; None if it was not measured, which is an error if there is a bound.
    """

    time: float
    memory: int | None = None


class Ended(Exception):
    """Raised to end a trial early.

    Args:
        status: of the trial.
        reason: shown to the user.
    """

    def __init__(self, status: Literal["over the bound", "pruned"], reason: str) -> None:
        super().__init__(reason)
        self.status: Literal["over the bound", "pruned"] = status
        self.reason = reason


class Watch:
    """Interface of a cost function to report measurements in progress, so a bad trial ends early.

    Passed to cost functions with a parameter ``watch``.

    Args:
        bound: bytes; None for no bound.
        outpaced: takes the time so far and returns whether the trial may end there.
        original: context manager to restore the model from before the trial inside its block.
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
        """Report the memory of the step in bytes.

        A trial over the bound ends with its first reported time.
        """
        self.seen_memory = memory

    def time(self, so_far: float) -> None:
        """Report the current estimate of the time, and end a trial over the bound or outpaced by others."""
        self.seen_time = so_far
        self.end_over_bound()
        if self._outpaced(so_far):
            raise Ended("pruned", "slower than most at this point")

    def end_over_bound(self) -> None:
        """End a trial over the bound, after its first time, to learn the effects of its knobs elsewhere."""
        if self.bound is not None and self.seen_memory is not None and self.seen_memory > self.bound:
            over = self.seen_memory - self.bound
            raise Ended("over the bound", f"{self.seen_memory:,} bytes, {over:,} more than allowed")


class TrainingStep:
    """Cost of a training step without the optimizer step: time relative to the original model, and peak memory.

    Memory is counted first: all allocations during forward and backward, gradients included, beyond the memory in use
    before. Then the step of the trial and the step of the original model are timed alternately; the time is the median
    of the rounds' ratios. Over the bound there is only one round. The model, its parameters, gradients and the random
    state are left unchanged.

    If the step of the original model does not fit in memory, it is timed in the largest parts of the batch that fit.

    Args:
        rounds: number of times both are timed.
        clock: returns seconds; on a machine without an accelerator shared with other users, ``time.process_time``
            does not count their time.
    """

    def __init__(self, rounds: int = 5, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rounds, self.clock = rounds, clock
        self._reference: list[Any] = []

    def __call__(self, sch: Node, watch: Watch, micro_batch: int | None = None, compiled: bool = False) -> Measured:
        """Measure the step.

        Args:
            sch: with the trial's steps applied.
            watch: receives the memory, then the time after each round.
            micro_batch: rows of the batch per part, with gradients accumulated; None for all.
            compiled: whether to use ``torch.compile``, on a copy that needs memory as well.

        Raises:
            NotApplicable: the batch has fewer rows, or the model is on the meta device.
        """
        model, batch = sch.module, sch.tree.graphs.batch
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
    """Raise the recompile limits of torch.compile, because earlier trials compiled the same forwards."""
    from fused.torch_internals.compiler import many_recompilations  # takes seconds

    return many_recompilations()


def _rows_that_fit(model: nn.Module, batch: Any) -> int:
    """Return the number of rows of ``batch`` fitting in memory at a time, by halving until a step runs."""
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
    """Return the number of rows of a batch, the first size of its first tensor with dimensions."""
    return next((tensor.shape[0] for tensor in named_tensors(batch).values() if tensor.ndim), 1)


def split(batch: Any, micro_batch: int | None) -> list[Any]:
    """Split ``batch`` into parts of ``micro_batch`` rows, each with all tensors of other sizes.

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
