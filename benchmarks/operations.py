"""Time of a call as the sum over its operations, each at its least of several calls.

Other work on a shared machine only adds to times, and rarely leaves a whole training step alone; a single operation,
with its few milliseconds, it often does. So this sum varies far less from run to run than the least time of the whole.
Where the tensors lie in memory changes times too, for as long as they lie there: so several copies are measured.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from typing import Any

from torch._inductor import config
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.timing import in_turns

Operation = tuple[str, int]
"""An operation's name, and how many of that name came before it in the call."""


def profiled_kernels() -> ContextDecorator:
    """Have kernels that torch.compile makes meanwhile seen by the profiler one by one."""
    patch: ContextDecorator = config.patch({"cpp.enable_kernel_profile": True})
    return patch


def self_seconds(run: Callable[[], Any]) -> dict[Operation, float]:
    """Call once, and return the seconds of each operation without those inside it.

    What is between the operations, such as Python's own work, counts as one operation. The profiler adds about a
    microsecond to each.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("whole call"):
        run()
    found: dict[Operation, float] = {}
    seen: Counter[str] = Counter()
    for event in sorted(profiled.events() or (), key=lambda event: event.time_range.start):
        found[event.name, seen[event.name]] = event.self_cpu_time_total / 1e6
        seen[event.name] += 1
    return found


def interleaved_by_operation(copies: Iterable[Mapping[str, Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Profile the candidates of each copy in turn, ``rounds`` times; each goes first in turn.

    Args:
        copies: the same candidates with tensors of their own. The first call of each is not measured.
        rounds: of one copy.

    Returns:
        Candidate → seconds of a call: the sum of the least seconds of each operation.
    """
    least: defaultdict[str, dict[Operation, float]] = defaultdict(dict)
    for candidates in copies:
        for name, run in in_turns(candidates, rounds):
            for operation, seconds in self_seconds(run).items():
                least[name][operation] = min(seconds, least[name].get(operation, math.inf))
    return {name: sum(operations.values()) for name, operations in least.items()}
