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

from schedule.generators import torch_states
from schedule.tracing.effects import uses_random
from schedule.tracing.guards import GuardMiss, check
from schedule.tracing.outputs import check_output
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
    if not (drawing or statistics or objects):
        return run
    return _undoing(run, drawing, statistics, objects)


def _before_checks(graph: fx.Graph) -> list[fx.Node]:
    """The nodes ahead of the last check."""
    nodes = list(graph.nodes)
    last = max((index for index, node in enumerate(nodes) if node.target in (check, check_output)), default=0)
    return nodes[:last]


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
