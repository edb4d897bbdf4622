"""Graphs that may find on their way that they do not hold, when numbers were drawn, statistics updated, caches filled.

The original forward that runs then has to find all as it was: it draws the same numbers, a batch is counted in the
statistics of a batch norm once, and its keys are in the cache once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from schedule.errors import ScheduleError
from schedule.generators import torch_states
from schedule.snapshots import Snapshot
from schedule.tracing.effects import uses_random
from schedule.tracing.guards import GuardMiss, check
from schedule.tracing.outputs import OutputMiss, check_output
from schedule.tracing.purity import is_called_with_hooks, unsafe_parts
from schedule.tracing.restoring import changes_given, restoring


def keeps_statistics(module: nn.Module) -> bool:
    """Whether ``module``, or a part of it, updates statistics in training."""
    return any(isinstance(child, _NormBase) and child.track_running_stats for child in module.modules())


def tried(run: Callable[..., Any], graph: fx.Graph, training: bool) -> Callable[..., Any]:
    """``run``, which undoes what it did if it misses a guard too late; ``run`` itself if it cannot."""
    found = _before_checks(graph)
    drawing = any(uses_random(node) or (training and node.op == "call_module") for node in found)
    statistics = tuple(str(node.target) for node in found if training and node.meta.get("statistics"))
    given = [node for node in graph.nodes if node.op == "placeholder"]
    changing = any(map(changes_given, found))
    objects = tuple(index for index, node in enumerate(given) if changing and node.meta.get("object"))
    undoing = run
    if drawing or statistics or objects:
        undoing = _undoing(run, drawing, statistics, objects)
    by_call = _calls(_before_checks(graph, check))
    by_output = _calls(found)
    return _guarded(undoing, by_call, by_output) if by_output else undoing


def _calls(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """The paths of the submodules that are called."""
    return tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))


def _before_checks(graph: fx.Graph, *checks: Any) -> list[fx.Node]:
    """The nodes ahead of the last check; of those given, or of any."""
    nodes = list(graph.nodes)
    wanted = checks or (check, check_output)
    last = max((index for index, node in enumerate(nodes) if node.target in wanted), default=0)
    return nodes[:last]


def _guarded(run: Callable[..., Any], by_branch: Sequence[str], by_output: Sequence[str]) -> Callable[..., Any]:
    """``run``, after which no submodule is called a second time if that can be noticed.

    Args:
        run: the graph.
        by_branch: submodules that are called before the last branch on data. What they may change is saved before;
            with a hook on one of them the original forward runs from the start.
        by_output: submodules that are called before the last check of an output. What they give is theirs to decide and
            seldom another structure, so that nothing is saved for that.
    """

    def guarded(module: nn.Module, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return run(module, *inputs)
        called = [module.get_submodule(path) for path in by_branch]
        if any(map(is_called_with_hooks, called)):
            raise GuardMiss("a branch on data comes after a hook")
        parts = [part for child in called for part in unsafe_parts(child)]
        before = Snapshot({"the modules called": parts}) if parts else None
        try:
            return run(module, *inputs)
        except GuardMiss as miss:
            if before is not None:
                before.restore()
            if isinstance(miss, OutputMiss):
                _refuse_a_second_call(module, [path for path in by_output if path not in by_branch], miss)
            raise

    return guarded


def _refuse_a_second_call(module: nn.Module, paths: Sequence[str], miss: OutputMiss) -> None:
    """Raise where the original forward would run a hook a second time."""
    for path in paths:
        child = module.get_submodule(path)
        if is_called_with_hooks(child):
            raise ScheduleError(
                f"{miss}; by then {path} was called, which runs a hook, so the original forward "
                "cannot run either",
                fix="undo, or schedule the model anew with inputs and settings as they are now",
            ) from miss


def _undoing(
    run: Callable[..., Any], drawing: bool, statistics: Sequence[str], objects: Sequence[int]
) -> Callable[..., Any]:
    def undoing(module: nn.Module, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return run(module, *inputs)
        states = torch_states() if drawing or statistics else ()
        buffers = [buffer for path in statistics for buffer in module.get_submodule(path).buffers()]
        kept = [buffer.clone() for buffer in buffers]
        pieces = restoring(inputs[index] for index in objects)
        try:
            return run(module, *inputs)
        except GuardMiss:
            for generator, state in states:
                generator.set_state(state)
            with torch.no_grad():
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)
            for restore in pieces:
                restore()
            raise

    return undoing
