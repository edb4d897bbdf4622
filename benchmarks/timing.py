"""Timing on a noisy machine by alternating runs, with medians and spread."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds per call over several rounds.

    Attributes:
        median: median of the rounds.
        low: first quartile.
        high: third quartile.
        ratios: median, first and third quartile of the time relative to the first candidate in the same round. The load
            of the machine, which changes from round to round, cancels out.
        least: of all rounds. What else the machine does can only add to a time, so this varies least from run to run.
    """

    median: float
    low: float
    high: float
    ratios: tuple[float, float, float] = (1.0, 1.0, 1.0)
    least: float = math.nan

    def __str__(self) -> str:
        return f"{self.median * 1e6:.1f} µs [{self.low * 1e6:.1f}, {self.high * 1e6:.1f}]"


def summarized(seconds: Mapping[str, list[float]]) -> dict[str, Timing]:
    """Return the timing of each candidate from one figure per round."""
    first = next(iter(seconds.values()), [])
    found = {}
    for name, figures in seconds.items():
        ratios = [figure / other for figure, other in zip(figures, first, strict=True)]
        found[name] = Timing(*_quartiles(figures), ratios=_quartiles(ratios), least=min(figures))
    return found


def _quartiles(figures: list[float]) -> tuple[float, float, float]:
    """Return the median, the first and the third quartile."""
    low, median, high = statistics.quantiles(figures, n=4) if len(figures) > 1 else figures * 3
    return median, low, high


def in_turns(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Call each candidate once, then yield all of them ``rounds`` times, in turn; each goes first in turn."""
    for run in candidates.values():
        run()
    turns = list(candidates.items())
    for _ in range(rounds):
        yield from turns
        turns = [*turns[1:], *turns[:1]]


def interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int = 15,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the candidates in turn, ``rounds`` times, with ``calls`` calls per measurement; each goes first in turn.

    Returns:
        Seconds per call of each candidate.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for name, run in in_turns(candidates, rounds):
        start = clock()
        for _ in range(calls):
            run()
        seconds[name].append((clock() - start) / calls)
    return summarized(seconds)


def write_json(path: Path, results: Any) -> None:
    """Write ``results`` with the versions of torch and Python and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"on": _machine(), "results": results}, indent=1) + "\n")


def merge_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write ``results`` beside those written before with the same versions and machine; others are dropped."""
    before = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {**(before["results"] if before.get("on") == _machine() else {}), **results})


def _machine() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
