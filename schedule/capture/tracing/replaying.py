"""Replay of submodule calls when a check inside a graph fails, so calls with effects happen only once.

The original forward then reaches the same submodules again. Most only compute and are called a second time. One that
runs a hook, updates state or fills a cache is not called again: its first output is returned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from schedule.capture.recording.calls import intercepted_calls
from schedule.capture.tracing.restoring import Restore, restoring
from schedule.util.generators import torch_states


@dataclass(frozen=True)
class Made:
    """Completed call of a submodule, with its output and the state after it.

    Attributes:
        path: path of the submodule.
        output: its output.
        states: random generators and their states after the call; empty if nothing draws.
        pieces: functions to restore the structure of the graph's input objects as it was after the call.
    """

    path: str
    output: Any
    states: Sequence[tuple[torch.Generator, torch.Tensor]]
    pieces: Sequence[Restore]

    def again(self) -> Any:
        """Return the output, and restore generators and objects as they were after the call."""
        for generator, state in self.states:
            generator.set_state(state)
        for restore in self.pieces:
            restore()
        return self.output


@dataclass
class Attempt:
    """Run of a graph with checks inside.

    Attributes:
        drawing: whether it draws random numbers.
        objects: input objects it may change.
        made: the calls so far not to be repeated.
    """

    drawing: bool
    objects: Sequence[Any]
    made: list[Made]

    def keep(self, path: str, output: Any) -> None:
        """Save the output of the call of the submodule at ``path``."""
        self.made.append(Made(path, output, torch_states() if self.drawing else (), restoring(self.objects)))


class _Attempts(threading.local):
    def __init__(self) -> None:
        self.stack: list[Attempt] = []


_attempts = _Attempts()


@contextmanager
def attempting(attempt: Attempt) -> Iterator[None]:
    """Collect calls of this thread by graphs from :func:`keeping` in ``attempt``."""
    _attempts.stack.append(attempt)
    try:
        yield
    finally:
        _attempts.stack.pop()


def keep(output: Any, path: str) -> None:
    """Save the output of a submodule call in the current attempt (graph target)."""
    _attempts.stack[-1].keep(path, output)


def keeping(graph: fx.Graph, paths: Collection[str]) -> fx.Graph:
    """Return a copy of ``graph`` with the outputs of calls of the submodules at ``paths`` saved."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.find_nodes(op="call_module"):
        if node.target in paths:
            with copy.inserting_after(node):
                copy.call_function(keep, (node, node.target))
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
