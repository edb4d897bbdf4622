"""Costs of one training step: bytes kept for backward, dispatched operations, peak memory and time."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

from fused.backends import Op
from fused.torch_internals.modes import TorchDispatchMode
from schedule.runtime.scheduled import uncounted
from schedule.util.generators import seed_all
from schedule.util.internal_errors import perform
from schedule.util.named_values import call
from schedule.verify.observe import loss_of
from schedule.verify.preserve import preserved


@dataclass(frozen=True)
class Cost:
    """The cost of one training step.

    Attributes:
        saved_bytes: bytes saved by autograd for backward, each storage once, without parameters and buffers.
        dispatched: operations that reach torch's dispatcher in forward and backward. A pass of a fused op counts as
            one, as if it were compiled; tensors too small for that run its formula, one operation after another.
    """

    saved_bytes: int
    dispatched: int


@dataclass(frozen=True)
class TimeRatio:
    """Time of a training step divided by the original model's, over several rounds.

    It is a ratio because machines differ.

    Attributes:
        median: median of the rounds; below 1 is faster.
        low: first quartile.
        high: third quartile.
        rounds: number of rounds.
        seconds: median seconds of a step of the original and of the scheduled model, if they were kept.
    """

    median: float
    low: float
    high: float
    rounds: int
    seconds: tuple[float, float] | None = None

    @classmethod
    def of(cls, seconds: Sequence[float], of_original: Sequence[float]) -> TimeRatio:
        """Summarize the seconds of one step per round, each with the original model's in the same round."""
        ratios = [own / original for own, original in zip(seconds, of_original, strict=True)]
        low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
        return cls(median, low, high, len(ratios), (statistics.median(of_original), statistics.median(seconds)))

    @property
    def verdict(self) -> Literal["faster", "slower", "no clear difference"]:
        """What the spread of the rounds allows to say."""
        return "faster" if self.high < 1 else "slower" if self.low > 1 else "no clear difference"

    def __str__(self) -> str:
        rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        return f"{self.median:.2f} × [{self.low:.2f}, {self.high:.2f}] in {rounds}, {self.verdict}"


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
        return perform(func, *args, **(kwargs or {}))


def _fused_pass() -> FrameType | None:
    """Return the frame of the running pass of a fused op, or None.

    Under a dispatch mode, the pass runs the op's formula.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not Op.run.__code__:
        frame = frame.f_back
    return frame


def measure(model: nn.Module, batch: Any) -> Cost:
    """Run one training step of ``model``, after a warm-up forward, and count its costs.

    The state of the model and the random state are restored.

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
        call(model, batch)  # a call of a further kind gets its graph here, because it gets none under a dispatch mode
        state = {s._cdata for t in (*model.parameters(), *model.buffers()) if (s := _storage(t)) is not None}
        with counting:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = loss_of(call(model, batch))
            activations = sum(storage.nbytes() for key, storage in saved.items() if key not in state)
            if loss is not None and loss.requires_grad:
                loss.backward()
    return Cost(saved_bytes=activations, dispatched=counting.count)


def step_seconds(model: nn.Module, *batches: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one training step of ``model``, after a warm-up step.

    The state of the model and the random state are restored.

    Args:
        batches: each a mapping (called by keyword), tuple or list (by position), or a single tensor; the gradients of
            several batches are accumulated.
        clock: function returning the time in seconds.
    """
    with training(model):
        run_step(model, batches)
        start = clock()
        run_step(model, batches)
        return clock() - start


def step_peak(model: nn.Module, *batches: Any) -> int:
    """Return the peak of bytes newly allocated in one training step of ``model``, including gradients.

    Args:
        batches: as for :func:`step_seconds`.
    """
    parameter = next(model.parameters(), None)
    with training(model):
        run_step(model, batches)  # one-time loading, compilation and caching do not count
        model.zero_grad()
        return peak_bytes(lambda: run_step(model, batches), "cpu" if parameter is None else parameter.device.type)


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Return the peak of bytes newly allocated during a call, on all devices of this type together."""
    if device == "cuda":
        cards = range(torch.cuda.device_count())
        for card in cards:
            torch.cuda.reset_peak_memory_stats(card)
        before = [torch.cuda.memory_allocated(card) for card in cards]
        run()
        return sum(torch.cuda.max_memory_allocated(card) - held for card, held in zip(cards, before, strict=True))
    return max(_allocated(run))


def kept_bytes(run: Callable[[], Any]) -> int:
    """Return the bytes newly allocated on the CPU in a call and kept by its result, such as a loss with its graph."""
    return _allocated(run)[-1]


def _allocated(run: Callable[[], Any]) -> list[int]:
    """Return the bytes newly allocated on the CPU after each allocation and deallocation of a call."""
    silence_profiler()
    gc.collect()  # else memory allocated in an earlier profile could be freed, and counted, in this one
    with collector_paused(), torch.profiler.profile(profile_memory=True) as profile:
        result = run()
    del result  # not before the profile has ended
    events = profile.profiler.kineto_results.events()
    return [0, *accumulate(event.nbytes() for event in events if event.name() == "[memory]")]


def silence_profiler() -> None:
    """Keep torch's profiler from printing when it starts and stops."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, for code with many live objects or measured memory."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run_step(model: nn.Module, batches: Sequence[Any]) -> None:
    """Run one training step, without an update, and wait for the device."""
    model.zero_grad()
    for batch in batches:
        loss = loss_of(call(model, batch))
        if loss is not None and loss.requires_grad:
            (loss / len(batches)).backward()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in training mode with a fixed seed, and restore it, its counts and the random state on exit."""
    with preserved(model), uncounted(model):
        model.train()
        seed_all(0)
        yield


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a plain strided tensor, or None for others, such as sharded ones."""
    plain = tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is _PLAIN
    return tensor.untyped_storage() if plain else None


_PLAIN = torch.Tensor.__torch_dispatch__
