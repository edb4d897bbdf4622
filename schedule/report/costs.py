"""What one training step costs: bytes saved for backward, operations dispatched, peak memory, counted; and time."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from fused.backends import Op
from fused.torch_internals.modes import TorchDispatchMode
from schedule.runtime.scheduled import uncounted
from schedule.util.generators import seed_all
from schedule.util.named_values import call
from schedule.verify.observe import loss_of
from schedule.verify.preserve import preserved


@dataclass(frozen=True)
class Cost:
    """The cost of one training step.

    Attributes:
        saved_bytes: what autograd keeps from forward for backward: each storage once, parameters and buffers
            left out.
        dispatched: operations that reach torch's dispatcher in forward and backward. A pass of a fused op is one,
            as it is where it is compiled; tensors too small for that take its formula, step by step.
    """

    saved_bytes: int
    dispatched: int


@dataclass(frozen=True)
class TimeRatio:
    """Time of a training step over that of the original model, by rounds: a ratio, since machines differ.

    Attributes:
        median: middle of the rounds; below 1 is faster.
        low: first quartile.
        high: third quartile.
        rounds: how many.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> TimeRatio:
        """Summary of one ratio per round."""
        low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
        return cls(median, low, high, len(ratios))

    def __str__(self) -> str:
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        return f"{self.median:.2f} × [{self.low:.2f}, {self.high:.2f}] in {rounds}"


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._inside: FrameType | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused_pass = _fused_pass()
        if fused_pass is None or fused_pass is not self._inside:
            self.count += 1
        self._inside = fused_pass
        return func(*args, **(kwargs or {}))


def _fused_pass() -> FrameType | None:
    """The running pass of a fused op, which under a dispatch mode is its formula."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not Op.run.__code__:
        frame = frame.f_back
    return frame


def measure(model: nn.Module, batch: Any) -> Cost:
    """Run one step of ``model`` in training mode and count, after a forward that warms up; all of it stays as it was.

    Args:
        batch: mapping (called by keyword), tuple or list (by position), or a single tensor.
    """
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        if storage is not None:
            saved.setdefault(storage._cdata, storage)
        return tensor

    counting = _Counting()
    with training(model):
        call(model, batch)  # a call of a new kind gets its graph here: it would not get one under a dispatch mode
        held = {s._cdata for t in (*model.parameters(), *model.buffers()) if (s := _storage(t)) is not None}
        with counting:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = loss_of(call(model, batch))
            kept = sum(storage.nbytes() for key, storage in saved.items() if key not in held)
            if loss is not None and loss.requires_grad:
                loss.backward()
    return Cost(saved_bytes=kept, dispatched=counting.count)


def step_seconds(model: nn.Module, *batches: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one training step of ``model``, after one that warms up; all of it stays as it was.

    Args:
        batches: each a mapping (called by keyword), tuple or list (by position), or a single tensor; the gradients of
            several are added up.
        clock: what counts the seconds.
    """
    with training(model):
        _step(model, batches)
        start = clock()
        _step(model, batches)
        return clock() - start


def step_peak(model: nn.Module, *batches: Any) -> int:
    """Bytes allocated at most in one training step of ``model``, gradients too, beyond what was there before.

    Args:
        batches: as for :func:`step_seconds`.
    """
    parameter = next(model.parameters(), None)
    with training(model):
        _step(model, batches)  # what is loaded, compiled and kept once does not count
        model.zero_grad()
        return peak_bytes(lambda: _step(model, batches), "cpu" if parameter is None else parameter.device.type)


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Bytes allocated at most during a call, beyond what was there before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its own comings and goings
    gc.collect()  # what an earlier profile saw come would be seen to go in this one
    with collector_paused(), torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, Python's garbage collector does not run: where many objects stay, or where it would be counted."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _step(model: nn.Module, batches: Sequence[Any]) -> None:
    model.zero_grad()
    for batch in batches:
        loss = loss_of(call(model, batch))
        if loss is not None and loss.requires_grad:
            (loss / len(batches)).backward()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Within, ``model`` trains by a fixed seed; afterwards it, its counts and the random state are what they were."""
    with preserved(model), uncounted(model):
        model.train()
        seed_all(0)
        yield


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor; that of a sharded one is out of reach."""
    plain = tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is _PLAIN
    return tensor.untyped_storage() if plain else None


_PLAIN = torch.Tensor.__torch_dispatch__
