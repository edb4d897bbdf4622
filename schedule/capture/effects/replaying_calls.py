"""Replay of submodule calls when a check inside a graph fails, so that none has its effects twice.

The original forward then reaches the same submodules again. They are not called, because what a call does besides its
result cannot be known: it may run a hook, update state or fill a cache. The first output is returned. Only plain
layers of torch are called again: fused ops may have computed some of their calls, so which of them are left is unknown.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.torch_modules import DropoutBase
from schedule.capture.effects.layers import is_plain, writes_own
from schedule.capture.effects.restoring import Restore, restoring
from schedule.capture.recording.interception import intercepted_calls
from schedule.util.errors import ScheduleError
from schedule.util.generators import State, set_states

Versions = list[tuple[torch.Tensor, tuple[int, bool]]]


@dataclass(frozen=True, slots=True)
class Made:
    """Completed call of a submodule, with its output and the state after it.

    Attributes:
        path: path of the submodule.
        output: its output.
        changed: whether it changed a tensor in place that it was given, or made it require gradients.
        versions: the tensors in its output, with their version counters and ``requires_grad`` after the call.
        states: random generators and their states after the call; empty if the graph itself draws nothing.
        pieces: functions to restore the structure of the graph's input objects as it was after the call.
    """

    path: str
    output: Any
    changed: bool
    versions: Versions
    states: Sequence[State]
    pieces: Sequence[Restore]

    @property
    def lasting(self) -> bool:
        """Whether neither its input nor its output was changed in place, so that it can be replayed."""
        return not (self.changed or _changed(self.versions))

    def again(self) -> Any:
        """Return the output, and restore generators and objects as they were after the call.

        Raises:
            ScheduleError: its input or output was changed in place, and what they were before is lost.
        """
        if not self.lasting:
            raise ScheduleError(
                f"a branch of the forward came out unlike in the recorded run after a tensor that {self.path} is given "
                "or returns had been changed in place, so the original forward cannot run either",
                fix="undo the schedule of this module, or schedule it anew with a call like this one",
            )
        set_states(self.states)
        for restore in self.pieces:
            restore()
        return self.output


@dataclass(slots=True)
class Attempt:
    """Run of a graph with checks inside.

    Attributes:
        root: the module of the graph.
        states: function that returns the states of the generators that the graph itself draws from, without submodules.
        objects: input objects it may change.
        made: the calls so far that are not simply made again.
    """

    root: nn.Module
    states: Callable[[], Sequence[State]]
    objects: Sequence[Any]
    made: list[Made]


class _Attempts(threading.local):
    def __init__(self) -> None:
        self.stack: list[Attempt] = []


_attempts = _Attempts()


class attempting:
    """Collect calls of this thread by graphs from :func:`keeping` in ``attempt``."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def __enter__(self) -> None:
        _attempts.stack.append(self.attempt)

    def __exit__(self, *_: object) -> None:
        _attempts.stack.pop()


def versions(*values: Any) -> Versions:
    """Return the tensors given to a submodule, or returned by it, with version and ``requires_grad`` (graph target).

    None under torch.compile, which handles missed guards by itself.
    """
    if torch.compiler.is_compiling():
        return []
    flat = [item for each in values for item in (each if isinstance(each, (tuple, list)) else (each,))]
    tensors = [each for each in flat if isinstance(each, torch.Tensor) and not each.is_inference()]
    return [(each, (each._version, each.requires_grad)) for each in tensors]


def _changed(before: Versions) -> bool:
    return any((each._version, each.requires_grad) != then for each, then in before)


def keep(output: Any, path: str, before: Versions, may_write: bool) -> None:
    """Save the output of a submodule call in the current attempt (graph target).

    Nothing is saved under torch.compile, nor of a layer that is called again: its output may be freed before the end,
    and other calls of it may be part of fused ops, which are not saved.
    """
    if torch.compiler.is_compiling():
        return
    attempt = _attempts.stack[-1]
    states = attempt.states()
    if is_repeatable(attempt.root.get_submodule(path), may_write, restored=bool(states)):
        return
    pieces = restoring(attempt.objects)  # whatever it was given: it, or a hook, may know them
    attempt.made.append(Made(path, output, _changed(before), versions(output), states, pieces))


def keeping(graph: fx.Graph, calls: Iterable[fx.Node]) -> fx.Graph:
    """Return a copy of ``graph`` with the outputs of these calls of submodules saved."""
    copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copied))
    for call in calls:
        node = copied[call]
        with copy.inserting_before(node):
            before = copy.call_function(versions, tuple(node.all_input_nodes))
        with copy.inserting_after(node):
            copy.call_function(keep, (node, str(node.target), before, writes_own(call)))
    return copy


def replayed(root: nn.Module, made: Iterable[Made]) -> AbstractContextManager[None]:
    """Replay the submodule calls of ``root`` in ``made`` instead of repeating them, in this thread."""
    left: dict[nn.Module, deque[Made]] = {}
    for each in made:
        left.setdefault(root.get_submodule(each.path), deque()).append(each)
    if not left:
        return nullcontext()

    def again(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waiting = left.get(module)
        return waiting.popleft().again() if waiting else call(*args, **kwargs)

    return intercepted_calls(root, again)


def is_repeatable(module: nn.Module, may_write: bool, restored: bool) -> bool:
    """Check whether a call of ``module`` can be made again: whether it only computes.

    Args:
        module: the module.
        may_write: whether it may change its input in place, since the forward has made that itself.
        restored: whether the states of generators are restored before, so that the same numbers are drawn.
    """
    drawing = isinstance(module, DropoutBase) and module.training and not restored
    return is_plain(module) and not drawing and (may_write or not getattr(module, "inplace", False))
