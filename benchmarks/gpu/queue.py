"""The queue: items in the order of their priority, each in a process of its own with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.log import Log

METHODS = ("forkserver", "spawn")
"""How children are started, fastest first: forked from a server that has imported torch, or from nothing."""
_LONGEST_ERROR = 300


@dataclass(frozen=True)
class Item:
    """A piece of work, ``function(log, *args)``.

    Attributes:
        priority: items with lower numbers run first.
        limit: seconds after which it is killed.
        least: seconds it is worth starting for.
        alone: runs beside no other item, because it measures.
    """

    name: str
    function: Callable[..., None]
    args: tuple[Any, ...] = ()
    priority: int = 0
    limit: float = 60.0
    least: float = 5.0
    alone: bool = False


def run_queue(items: Sequence[Item], log: Log, budget: float, beside: int, method: str = METHODS[0]) -> None:
    """Run the items until the budget of seconds is spent, at most `beside` of them at once."""
    end = time.monotonic() + budget
    waiting = sorted(items, key=lambda item: item.priority)
    running: list[_Child] = []
    try:
        while waiting or running:
            running = [child for child in running if not child.ended()]
            waiting = _without_late(waiting, log, end)
            while waiting and _may_start(waiting[0], running, beside):
                running.append(_Child(waiting.pop(0), log, end, method))
            wait([child.process.sentinel for child in running], timeout=0.2)
    finally:
        for child in running:
            child.kill()


def touch(log: Log, device: str) -> None:
    """Compute something on the device."""
    log.result(touched=float(torch.ones(2, device=device).sum()))


def working_method(log: Log, device: str) -> str:
    """Return the fastest way of starting children in which they can use the card."""
    for method in METHODS[:-1]:
        run_queue([Item(f"start by {method}", touch, (device,))], log, 60, 1, method)
        if log.read()[-1]["status"] == "done":
            return method
    return METHODS[-1]


def _may_start(item: Item, running: Sequence[_Child], beside: int) -> bool:
    if item.alone or any(child.item.alone for child in running):
        return not running
    return len(running) < beside


def _without_late(waiting: list[Item], log: Log, end: float) -> list[Item]:
    """Drop the items for which too little time is left, and write that down."""
    left = end - time.monotonic()
    for item in waiting:
        if item.least > left:
            log.of(item.name).outcome("skipped", 0.0, f"{max(left, 0):.0f} s left of the budget")
    return [item for item in waiting if item.least <= left]


@dataclass
class _Child:
    """An item that is running."""

    item: Item
    log: Log
    end: float
    method: str
    process: BaseProcess = field(init=False)

    def __post_init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="benchmark_")
        os.close(handle)
        self.output = Path(name)
        self.started = time.monotonic()
        self.end = min(self.end, self.started + self.item.limit)
        context: Any = multiprocessing.get_context(self.method)
        self.process = context.Process(target=_work, args=(self.item, self.log, name))
        self.process.start()

    def ended(self) -> bool:
        """Check whether the process is over, or kill it if its time is; write down how it ended."""
        if self.process.exitcode is None and time.monotonic() < self.end:
            return False
        code = self.process.exitcode
        self.kill()
        status, error = _outcome(code, self.output.read_text(errors="replace"))
        self.log.of(self.item.name).outcome(status, time.monotonic() - self.started, error)
        self.output.unlink()
        return True

    def kill(self) -> None:
        """Kill the process and all that it started."""
        pid = self.process.pid
        try:
            if pid is not None:
                os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # it has not got as far as its own group, or is over
        self.process.join()


def _outcome(code: int | None, output: str) -> tuple[str, str]:
    if code == 0:
        return "done", ""
    lines = [line for line in output.splitlines() if line.strip()]
    # The last line of an error of CUDA only says how to find out more.
    named = [line for line in lines[:-1] if re.match(r"[\w.]*Error: ", line)]
    last = " … ".join((*named[-1:], *lines[-1:]))[:_LONGEST_ERROR]
    if code is None:
        return "timed out", last
    return ("failed", last) if code > 0 else (f"killed by {signal.Signals(-code).name}", last)


def _work(item: Item, log: Log, output: str) -> None:
    """Run an item in the child process, with its output in a file."""
    os.setsid()
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    item.function(log.of(item.name), *item.args)
