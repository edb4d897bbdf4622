"""Time of single calls on the card, with a cold L2 cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.timing import Timing, summarized

WAITING = 8_000_000
"""Cycles that the card waits before a call, some 4 ms: more than the processor takes to launch it."""

Call = Callable[[], Any]
Ready = Callable[[int], Call]
"""For the number of a round, the call to time, with all that is not timed done."""


class Clock:
    """Times calls by events on the card, or by the processor's clock on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
        self.flushed = torch.empty(4 * cache, dtype=torch.uint8, device=device)

    def interleaved(self, candidates: Mapping[str, Ready], rounds: int) -> dict[str, Timing]:
        """Time one call of each candidate in turn, after one round of warm-up."""
        for ready in candidates.values():
            ready(0)()
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for number in range(rounds):
            for name, ready in candidates.items():
                seconds[name].append(self._once(ready(number)))
        return summarized(seconds)

    def back_to_back(self, candidates: Mapping[str, Ready], rounds: int, calls: int) -> dict[str, Timing]:
        """Time runs of calls by the processor's clock, up to the end of the work: what a launch costs counts."""
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for number in range(-1, rounds):
            for name, ready in candidates.items():
                prepared = [ready(call) for call in range(calls)]
                self.synchronize()
                start = time.perf_counter()
                for call in prepared:
                    call()
                self.synchronize()
                if number >= 0:
                    seconds[name].append((time.perf_counter() - start) / calls)
        return summarized(seconds)

    def synchronize(self) -> None:
        """Wait for the card."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _once(self, call: Call) -> float:
        if self.device != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        # The card waits, and clears the cache, while the processor launches the call, so launches are not timed.
        torch.cuda._sleep(WAITING)
        self.flushed.zero_()
        begin.record()
        call()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def peak_above(call: Call, device: str) -> int:
    """Return the peak of bytes allocated on the card during a call, above those before; 0 on the CPU."""
    if device != "cuda":
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def relative_error(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the largest ‖result − exact‖ / ‖exact‖ of the tensors; NaN if one holds a NaN."""
    errors = [
        float((mine.double() - truth).norm() / truth.norm().clamp_min(1e-30))
        for mine, truth in zip(results, exact, strict=True)
    ]
    return max(errors, key=lambda error: (error != error, error))


def microseconds(timing: Timing) -> list[float]:
    """Return median, first and third quartile, for a line of results."""
    return [round(seconds * 1e6, 2) for seconds in (timing.median, timing.low, timing.high)]
