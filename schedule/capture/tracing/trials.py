"""Recovery from a failed check in a graph, after random draws, statistics updates or cache writes.

The original forward then needs the state from before: it draws the same numbers, a batch is counted only once in the
statistics of a batch norm, its keys are only once in the cache, and a hook runs only once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from schedule.capture.tracing.effects import has_effect, uses_random
from schedule.capture.tracing.guards import GuardMiss, check
from schedule.capture.tracing.outputs import check_output
from schedule.capture.tracing.purity import is_repeatable
from schedule.capture.tracing.replaying import Attempt, attempting, keeping
from schedule.capture.tracing.restoring import changes_given, restoring
from schedule.util.errors import ScheduleError
from schedule.util.generators import torch_states

Run = Callable[..., Any]


def tried(graph: fx.Graph, training: bool, compiled: Callable[[fx.Graph], Run]) -> Run:
    """Return ``graph`` as a function of the module and inputs, with its effects undone on a late guard miss.

    Args:
        graph: the graph.
        training: whether it runs in training mode.
        compiled: function to compile a graph.
    """
    run, nodes = compiled(graph), list(graph.nodes)
    last = max((index for index, node in enumerate(nodes) if node.target in (check, check_output)), default=0)
    found = nodes[:last]
    noticed = any(node.op == "call_module" or uses_random(node) or changes_given(node) for node in found)
    return _Trial(run, graph, found, training, compiled) if noticed else run


class _Trial:
    """Function of a graph with possible guard misses after the nodes ``found``."""

    def __init__(
        self, run: Run, graph: fx.Graph, found: list[fx.Node], training: bool, compiled: Callable[[fx.Graph], Run]
    ) -> None:
        self.run, self.graph, self.compiled, self.training = run, graph, compiled, training
        calls = [node for node in found if node.op == "call_module"]
        self.called = tuple(dict.fromkeys(str(node.target) for node in calls))
        self.writing = {str(node.target) for node in calls if has_effect(node)}
        self.drawing = any(map(uses_random, found)) or bool(calls)
        given = [node for node in graph.nodes if node.op == "placeholder"]
        changing = any(map(changes_given, found))
        self.objects = tuple(index for index, node in enumerate(given) if changing and node.meta.get("object"))
        self._once: WeakKeyDictionary[nn.Module, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()
        self._keeping: dict[tuple[str, ...], Run] = {}

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        """Run the graph.

        Raises:
            GuardMiss: a check failed; all changes are undone, except by the calls listed in ``GuardMiss.made``.
        """
        if torch.compiler.is_compiling():
            return self.run(module, *inputs)
        paths = self.once(module)
        objects = [inputs[index] for index in self.objects]
        states, pieces = torch_states() if self.drawing else (), restoring(objects)
        attempt = Attempt(self.drawing, objects, [])
        try:
            if not paths:
                return self.run(module, *inputs)
            with attempting(attempt):
                return self.keeping(paths)(module, *inputs)
        except GuardMiss as miss:
            self.refuse_second_calls(module, paths, miss)
            for generator, state in states:
                generator.set_state(state)
            for restore in pieces:
                restore()
            miss.made = tuple(attempt.made)
            raise

    def once(self, module: nn.Module) -> tuple[str, ...]:
        """Return the submodules not to be called a second time (cached until any hook is registered)."""
        latest, known = RemovableHandle.next_id, self._once.get(module)
        if known is None or known[0] != latest:
            known = self._once[module] = latest, self._unrepeatable(module)
        return known[1]

    def _unrepeatable(self, module: nn.Module) -> tuple[str, ...]:
        def is_one(path: str) -> bool:
            return path in self.writing or not is_repeatable(module.get_submodule(path), self.training)

        return tuple(filter(is_one, self.called))

    def keeping(self, paths: tuple[str, ...]) -> Run:
        """Return the graph's function with the outputs of calls of the submodules at ``paths`` saved."""
        if paths not in self._keeping:
            self._keeping[paths] = self.compiled(keeping(self.graph, paths))
        return self._keeping[paths]

    def refuse_second_calls(self, module: nn.Module, paths: tuple[str, ...], miss: GuardMiss) -> None:
        """Raise if the original forward would repeat a call of a submodule changed since the last check."""
        for path in self._unrepeatable(module):
            if path not in paths:
                raise ScheduleError(
                    f"{miss}; by then {path} was called, which may change state since it was last looked at, so the "
                    "original forward cannot run either",
                    fix="undo, or schedule the model anew with inputs and settings as they are now",
                ) from miss
