"""Calls that are made once, also where a graph finds on its way that it does not hold.

The original forward that runs then comes to the same submodules again. Most only compute, and are called a second time.
One that runs a hook, updates a state or fills a cache is not: what it gave the first time is what it gives again.
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
    """A call of a submodule that was made, with what it left.

    Attributes:
        path: the submodule's.
        output: what it returned.
        states: generators and their states after it; none where nothing draws.
        pieces: what puts the structure of the objects given to the graph to what it was after it.
    """

    path: str
    output: Any
    states: Sequence[tuple[torch.Generator, torch.Tensor]]
    pieces: Sequence[Restore]

    def again(self) -> Any:
        """The output, with everything else as the call left it."""
        for generator, state in self.states:
            generator.set_state(state)
        for restore in self.pieces:
            restore()
        return self.output


@dataclass
class Attempt:
    """A run of a graph that may find that it does not hold.

    Attributes:
        drawing: whether it draws random numbers.
        objects: what it was given and may change.
        made: the calls so far that are not to be made again.
    """

    drawing: bool
    objects: Sequence[Any]
    made: list[Made]

    def keep(self, path: str, output: Any) -> None:
        """Keep what the call of the submodule at ``path`` returned."""
        self.made.append(Made(path, output, torch_states() if self.drawing else (), restoring(self.objects)))


class _Attempts(threading.local):
    def __init__(self) -> None:
        self.stack: list[Attempt] = []


_attempts = _Attempts()


@contextmanager
def attempting(attempt: Attempt) -> Iterator[None]:
    """Within, the calls that a graph made by :func:`keeping` makes in this thread are kept in ``attempt``."""
    _attempts.stack.append(attempt)
    try:
        yield
    finally:
        _attempts.stack.pop()


def keep(output: Any, path: str) -> None:
    """In a graph: keep what the call of the submodule at ``path`` returned."""
    _attempts.stack[-1].keep(path, output)


def keeping(graph: fx.Graph, paths: Collection[str]) -> fx.Graph:
    """A copy of ``graph`` that keeps what calls of the submodules at ``paths`` return."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.find_nodes(op="call_module"):
        if node.target in paths:
            with copy.inserting_after(node):
                copy.call_function(keep, (node, node.target))
    return copy


def replayed(root: nn.Module, made: Iterable[Made]) -> AbstractContextManager[None]:
    """Within, the calls of submodules of ``root`` that were ``made`` are not made again in this thread."""
    left: dict[nn.Module, deque[Made]] = {}
    for each in made:
        left.setdefault(root.get_submodule(each.path), deque()).append(each)
    if not left:
        return nullcontext()

    def again(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waiting = left.get(module)
        return waiting.popleft().again() if waiting else call(*args, **kwargs)

    return intercepted_calls(root, again)
