"""Calls that keep their inputs only, and run again when the backward pass needs what is inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from schedule.capture.recording.structure import leaves, map_structure
from schedule.util.copying import copied
from schedule.util.generators import generator_states, restore_generators


class Recomputed:
    """Runs a call under ``torch.utils.checkpoint`` (not reentrant), if there is going to be a backward pass.

    Random numbers are drawn again as they were: torch's, Python's and numpy's. A cache among the arguments is seen
    again as it was. torch checks that what is recomputed looks as it did, and raises ``CheckpointError`` if not.
    """

    def __call__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``run(*args, **kwargs)``."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        given = (*args, *kwargs.values())
        if torch.compiler.is_compiling():
            return checkpoint(_by_name, run, tuple(kwargs), *given, use_reentrant=False)
        if any(map(_has_state, (leaf for _, leaf in leaves(given)))):
            run = _Rerunnable(run, given, tuple(kwargs))
        replayed = _generators_replayed
        return checkpoint(_by_name, run, tuple(kwargs), *given, use_reentrant=False, context_fn=replayed)

    def __repr__(self) -> str:
        return "Recomputed()"


def _by_name(run: Callable[..., Any], names: tuple[str, ...], *given: Any) -> Any:
    """Keyword arguments come last in order: torch keeps positional tensors as it keeps any saved tensor."""
    positional = len(given) - len(names)
    return run(*given[:positional], **dict(zip(names, given[positional:], strict=True)))


class _Rerunnable:
    """A call with arguments that it changes, such as a cache: the second time it gets them as they were."""

    def __init__(self, run: Callable[..., Any], given: tuple[Any, ...], names: tuple[str, ...]) -> None:
        self.run, self.names = run, names
        self.states = [_copied(value) if _holds_state(value) else None for value in given]
        self.first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.first:
            self.first = False
            return self.run(*args, **kwargs)
        given = [
            value if state is None else _copied(state)
            for value, state in zip((*args, *kwargs.values()), self.states, strict=True)
        ]
        return _by_name(self.run, self.names, *given)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module)


def _has_state(leaf: Any) -> bool:
    return not isinstance(leaf, (torch.Tensor, *_PLAIN)) and not callable(leaf)


def _holds_state(value: Any) -> bool:
    return any(_has_state(leaf) for _, leaf in leaves(value))


def _copied(value: Any) -> Any:
    """What holds tensors copied, and not the tensors."""
    return map_structure(value, lambda leaf: copied(leaf, lambda tensor: tensor) if _has_state(leaf) else leaf)


def _generators_replayed() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the forward and for the recomputation: Python's and numpy's generators; torch replays its own itself."""
    return nullcontext(), _replaying(_others())


def _others() -> dict[str, Any]:
    return {name: state for name, state in generator_states(_NOWHERE).items() if name in ("python", "numpy")}


@contextmanager
def _replaying(states: dict[str, Any]) -> Iterator[None]:
    now = _others()
    restore_generators(states)
    try:
        yield
    finally:
        restore_generators(now)


_NOWHERE = nn.Identity()  # no parameters: no devices to ask
