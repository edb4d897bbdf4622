"""Recovery from a failed check in a graph, after random draws, statistics updates or cache writes.

The original forward then needs the state from before: it draws the same numbers, a batch is counted only once in the
statistics of a batch norm, its keys are only once in the cache, and a hook runs only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from schedule.capture.effects.effects import assigned_attribute, drawn_number, uses_random
from schedule.capture.effects.later_reads import reads_later
from schedule.capture.effects.layers import DirectCalls, Run, calls_only_layers, is_layer
from schedule.capture.effects.replaying_calls import Attempt, attempting, is_repeatable, keeping
from schedule.capture.effects.restoring import changes_given, restoring, restoring_attributes
from schedule.capture.specializing.conditions import GuardMiss, check
from schedule.capture.specializing.output_checks import check_output
from schedule.util.generators import State, all_states, set_states, torch_states


def tried(graph: fx.Graph, compiled: Callable[[fx.Graph], Run]) -> Run:
    """Return ``graph`` as a function of the module and inputs, with its effects undone on a late guard miss.

    Args:
        graph: the graph.
        compiled: function to compile a graph.
    """
    found = _before_checks(graph)
    noticed = any(map(_is_noticed, found))
    return _Trial(graph, found, compiled) if noticed else compiled(graph)


def directly(graph: fx.Graph, run: Run, compiled: Callable[[fx.Graph], Run]) -> Run:
    """Return ``run``, or a function with direct calls of the layers of ``graph`` if this saves checks.

    Args:
        graph: the graph.
        run: function of the module and inputs for any call.
        compiled: function to compile a graph.
    """
    found = _before_checks(graph)
    repeating = any(node.op == "call_module" for node in found)  # with nothing kept of them
    if not calls_only_layers(graph) or not (repeating or reads_later(graph)):
        return run
    drawing = any(map(_draws, found))
    is_quiet = partial(is_repeatable, restored=drawing) if repeating else lambda layer, _: is_layer(layer)
    return DirectCalls(graph, run, lambda graph: tried(graph, compiled), is_quiet)


def _before_checks(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes up to the last check."""
    nodes = list(graph.nodes)
    return nodes[: max((index for index, node in enumerate(nodes) if node.target in (check, check_output)), default=0)]


def _draws(node: fx.Node) -> bool:
    return bool(node.meta.get("draws")) or uses_random(node)


def _is_noticed(node: fx.Node) -> bool:
    return node.op == "call_module" or uses_random(node) or changes_given(node) or assigned_attribute(node) is not None


class _Trial:
    """Function of a graph with possible guard misses after the nodes ``found``."""

    def __init__(self, graph: fx.Graph, found: list[fx.Node], compiled: Callable[[fx.Graph], Run]) -> None:
        self.keeping = compiled(keeping(graph, [node for node in found if node.op == "call_module"]))
        drawing = any(map(_draws, found))
        outside = any(node.target is drawn_number for node in found)
        self.states: Callable[[], Sequence[State]] = all_states if outside else torch_states if drawing else tuple
        given = [node for node in graph.nodes if node.op == "placeholder"]
        # A submodule, or a hook of it, may change them too, whatever it is given.
        changing = any(node.op == "call_module" or changes_given(node) for node in found)
        self.assigned = [assigned for node in found if (assigned := assigned_attribute(node)) is not None]
        self.objects = tuple(index for index, node in enumerate(given) if changing and node.meta.get("object"))

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        """Run the graph.

        Raises:
            GuardMiss: a check failed; all changes are undone, except by the calls listed in ``GuardMiss.made``.
        """
        if torch.compiler.is_compiling():
            return self.keeping(module, *inputs)
        objects = [inputs[index] for index in self.objects]
        states = self.states()
        pieces = [*restoring(objects), *restoring_attributes(module, self.assigned)]
        attempt = Attempt(module, self.states, objects, [])
        try:
            with attempting(attempt):
                return self.keeping(module, *inputs)
        except GuardMiss as miss:
            set_states(states)
            for restore in pieces:
                restore()
            miss.made = tuple(attempt.made)
            raise
