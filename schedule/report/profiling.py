"""Profile of one step as a Chrome trace, for Perfetto, with each rewrite named by its rule and module."""

from __future__ import annotations

import json
import operator
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from schedule.capture import RULE, Specialization
from schedule.core.node import Node
from schedule.report.comparing import refuse_sharded, refuse_without_data, trains
from schedule.report.costs import run_step, silence_profiler, training
from schedule.runtime.scheduled import ScheduledState, put, state_of
from schedule.util.files import refuse_unwritable, write

_BACKWARD = "autograd::engine::evaluate_function"


def profile_step(sch: Node, file: str | Path, batch: Any = None) -> Path:
    """Run one training step of the model, and write its profile for https://ui.perfetto.dev or ``chrome://tracing``.

    Each rewrite is a range of its own, such as ``bias_gelu_tanh: transformer.h.0.mlp``, and its backward pass one more,
    ``bias_gelu_tanh: transformer.h.0.mlp (backward)``. A step before it is not profiled, as it compiles kernels. The
    model and random generators are restored.

    Args:
        sch: the schedule of the model, or of a part of it.
        file: the JSON file to write.
        batch: a batch of the model; None for the example inputs.

    Returns:
        The file.

    Raises:
        NotApplicable: the file cannot be written, or the model does not train on the batch.
    """
    path, top = Path(file), sch.root
    refuse_unwritable(path, "profile")
    refuse_without_data(top)
    refuse_sharded(top)
    if batch is None:
        _ = top.tree.graphs.recording  # makes example inputs if none were given
        batch = top.tree.graphs.batch
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    silence_profiler()
    with trains(), training(top.module), _named(top.module):
        run_step(top.module, [batch])
        with torch.profiler.profile(activities=activities) as profile:
            run_step(top.module, [batch])
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(raw))
        content = json.loads(raw.read_text(encoding="utf-8"))
    content["traceEvents"] += _backward_ranges(content["traceEvents"])
    write(path, json.dumps(content))
    return path


@contextmanager
def _named(root: nn.Module) -> Iterator[None]:
    """Run all scheduled modules of ``root`` by graphs with a range around each rewrite."""
    states = {module: state for module in root.modules() if (state := state_of(module)) is not None}
    paths = {module: path for path, module in root.named_modules()}
    try:
        for module, state in states.items():
            named = [_with_ranges(each, paths[module]) for each in state.specializations]
            put(module, ScheduledState(state.module_class, named, state.name, state.forward, state.adapter))
        yield
    finally:
        for module, state in states.items():
            put(module, state)


def _with_ranges(made: Specialization, path: str) -> Specialization:
    """Return ``made`` with a range around each node of a rewrite."""
    if not any(RULE in node.meta for node in made.graph.nodes):
        return made
    graph = fx.Graph()
    graph.output(graph.graph_copy(made.graph, {}))
    for node in list(graph.nodes):
        if RULE not in node.meta or node.op not in ("call_function", "call_method") or node.target is operator.getitem:
            continue
        inside = ".".join(filter(None, (path, node.meta.get("module", ""))))
        with graph.inserting_before(node):
            opened = graph.call_function(_begin, (f"{node.meta[RULE]}: {inside or 'the root module'}",))
        with graph.inserting_after(node):
            graph.call_function(_end, (opened,))
    return made.with_graph(graph)


def _begin(name: str) -> torch.profiler.record_function:
    opened = torch.profiler.record_function(name)
    opened.__enter__()
    return opened


def _end(opened: torch.profiler.record_function) -> None:
    opened.__exit__(None, None, None)


@dataclass(frozen=True)
class _Range:
    """A range of a rewrite in the trace."""

    name: str
    thread: tuple[Any, Any]
    start: float
    end: float

    def holds(self, event: dict[str, Any]) -> bool:
        thread = (event["pid"], event["tid"])
        return thread == self.thread and self.start <= event["ts"] and event["ts"] + event["dur"] <= self.end


def _backward_ranges(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a range for each part of the backward pass that belongs to a rewrite.

    An operation and its part of the backward pass have the same sequence number.
    """
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    ranges = [
        _Range(event["name"], (event["pid"], event["tid"]), event["ts"], event["ts"] + event["dur"])
        for event in timed
        if event.get("cat") == "user_annotation" and ": " in event["name"]
    ]
    numbered = [event for event in timed if "Sequence number" in event.get("args", {})]
    owners: dict[int, str] = {}
    for event in numbered:
        if not event["name"].startswith(_BACKWARD):
            owner = next((each.name for each in ranges if each.holds(event)), None)
            if owner is not None:
                owners[event["args"]["Sequence number"]] = owner
    found = []
    for event in numbered:
        owner = owners.get(event["args"]["Sequence number"])
        if owner is not None and event["name"].startswith(_BACKWARD):
            found.append({**event, "cat": "user_annotation", "name": f"{owner} (backward)", "args": {}})
    return found
