"""Time of a call as the sum over its operations, each at its least of several calls.

Other work on a shared machine only adds to times, and rarely leaves a whole training step alone; a single operation,
with its few milliseconds, it often does. So this sum varies far less from run to run than the least time of the whole.
Where the tensors lie in memory changes times too, for as long as they lie there: so several copies are measured. And an
operation of torch that candidates have in common, on tensors of the same shapes, strides and dtypes, takes the same
time in each: its least of all of them. What is left between candidates are the operations in which they differ.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ContextDecorator
from itertools import chain
from typing import Any, NamedTuple

from torch._inductor import config
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.timing import in_turns


class Operation(NamedTuple):
    """One operation of a call.

    Attributes:
        name: as torch's profiler says it.
        inputs: shapes, strides and dtypes of its tensors, and its other arguments; empty where it has no tensors.
        number: how many of the same name and inputs came before it in the call.
    """

    name: str
    inputs: str
    number: int

    @property
    def is_shared(self) -> bool:
        """Whether this is the same work in all candidates with it; compiled kernels say no inputs."""
        return self.name.startswith("aten::") and bool(self.inputs)


def profiled_kernels() -> ContextDecorator:
    """Have kernels that torch.compile makes meanwhile seen by the profiler one by one."""
    patch: ContextDecorator = config.patch({"cpp.enable_kernel_profile": True})
    return patch


def self_seconds(run: Callable[[], Any]) -> dict[Operation, float]:
    """Call once, and return the seconds of each operation without those inside it.

    What is between the operations, such as Python's own work, counts as one operation. The profiler adds about a
    microsecond to each.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled, record_function("whole call"):
        run()
    found: dict[Operation, float] = {}
    seen: Counter[tuple[str, str]] = Counter()
    inputs = dict(_inputs(profiled))
    for event in sorted(profiled.events() or (), key=lambda event: event.time_range.start):
        kind = (event.name, _described(inputs.get(event.id, ()), event))
        found[Operation(*kind, seen[kind])] = event.self_cpu_time_total / 1e6
        seen[kind] += 1
    return found


def _inputs(profiled: profile) -> Iterator[tuple[int, Iterable[Any]]]:
    """Yield the id of each operation of torch, and its inputs; events themselves have no strides before torch 2.13."""
    results: Any = profiled.profiler and profiled.profiler.kineto_results
    pending = list(results.experimental_event_tree())
    while pending:
        node = pending.pop()
        pending += node.children
        yield node.correlation_id, getattr(node.extra_fields, "inputs", ())


def _described(inputs: Iterable[Any], event: FunctionEvent) -> str:
    tensors = [_tensor(each) for each in inputs]
    return str((tensors, event.concrete_inputs)) if any(tensors) else ""


def _tensor(value: Any) -> Any:
    """Return the shape, strides and dtype of a tensor, a list of those of many, or None."""
    if isinstance(value, list):
        return [_tensor(each) for each in value] or None
    return (value.sizes, value.strides, str(value.dtype)) if hasattr(value, "strides") else None


def interleaved_by_operation(copies: Iterable[Mapping[str, Callable[[], Any]]], rounds: int) -> dict[str, float]:
    """Profile the candidates of each copy in turn, ``rounds`` times; each goes first in turn.

    Args:
        copies: the same candidates with tensors of their own. The first call of each is not measured.
        rounds: of one copy.

    Returns:
        Candidate → seconds of a call: the sum of the least seconds of each operation; of one that is shared, in any.
        Of calls with other operations, the one with the least sum.
    """
    least: defaultdict[str, dict[Operation, float]] = defaultdict(dict)
    calls: defaultdict[str, set[frozenset[Operation]]] = defaultdict(set)
    for candidates in copies:
        for name, run in in_turns(candidates, rounds):
            found = self_seconds(run)
            calls[name].add(frozenset(found))
            for operation, seconds in found.items():
                least[name][operation] = min(seconds, least[name].get(operation, math.inf))
    shared: defaultdict[Operation, float] = defaultdict(lambda: math.inf)
    for operation, seconds in chain.from_iterable(operations.items() for operations in least.values()):
        if operation.is_shared:
            shared[operation] = min(seconds, shared[operation])
    return {
        name: min(sum(shared.get(each, least[name][each]) for each in call) for call in calls[name]) for name in calls
    }
