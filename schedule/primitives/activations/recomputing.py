"""Calls saving only their inputs and rerun in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from schedule.capture import leaves, map_structure
from schedule.util.copying import copied
from schedule.util.generators import generator_states, restore_generators


class Recomputed:
    """Wrapper to run a call under non-reentrant ``torch.utils.checkpoint`` if gradients are enabled.

    The recomputation draws the same random numbers, from torch, Python and numpy, and gets a cache among the arguments
    in its initial state. What it changes in the buffers of the module, such as the running statistics of a batch norm,
    changes copies of them. torch compares the metadata of recomputed tensors and raises ``CheckpointError`` if they
    differ.
    """

    def __call__(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``run(*args, **kwargs)``, checkpointed if gradients are enabled."""
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        given = (*args, *kwargs.values())
        if torch.compiler.is_compiling():
            return checkpoint(_by_name, run, tuple(kwargs), *given, use_reentrant=False)
        if any(map(_has_state, (leaf for _, leaf in leaves(given)))):
            run = _Rerunnable(run, given, tuple(kwargs))
        modules = [value for value in given if isinstance(value, nn.Module)]
        contexts = partial(_contexts, modules)
        return checkpoint(_by_name, run, tuple(kwargs), *given, use_reentrant=False, context_fn=contexts)

    def __repr__(self) -> str:
        return "Recomputed()"


def _by_name(run: Callable[..., Any], names: tuple[str, ...], *given: Any) -> Any:
    """Call ``run`` with the last arguments passed by keyword.

    ``checkpoint`` gets keyword arguments by position, because it stores positional tensors like any saved tensor.
    """
    positional = len(given) - len(names)
    return run(*given[:positional], **dict(zip(names, given[positional:], strict=True)))


class _Rerunnable:
    """Call with stateful arguments, such as a cache, rerun with copies of their initial state."""

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
    """Copy the stateful objects in ``value``, such as caches, but not their tensors."""
    return map_structure(value, lambda leaf: copied(leaf, lambda tensor: tensor) if _has_state(leaf) else leaf)


def _contexts(modules: list[nn.Module]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for the forward and for the recomputation, with the same Python and numpy random numbers.

    torch's checkpoint restores torch's own generators.
    """
    return nullcontext(), _Replaying(_others(), modules)


def _others() -> dict[str, Any]:
    return {name: state for name, state in generator_states(_NOWHERE).items() if name in ("python", "numpy")}


@dataclass
class _Replaying(AbstractContextManager[None]):
    """Context of each recomputation; ``retain_graph`` and ``create_graph`` lead to several."""

    states: dict[str, Any]
    modules: list[nn.Module]

    def __enter__(self) -> None:
        self._current = _replaying(self.states, self.modules)
        self._current.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._current.__exit__(*error)


@contextmanager
def _replaying(states: dict[str, Any], modules: list[nn.Module]) -> Iterator[None]:
    now = _others()
    tables = {id(one): one._buffers for module in modules for one in module.modules()}
    buffers = [(table, dict(table)) for table in tables.values()]
    copies = {id(one): one.clone() for _, kept in buffers for one in kept.values() if one is not None}
    restore_generators(states)
    for table, kept in buffers:
        table.update({name: copies[id(one)] for name, one in kept.items() if one is not None})
    try:
        yield
    finally:
        restore_generators(now)
        for table, kept in buffers:
            table.update(kept)


_NOWHERE = nn.Identity()  # no parameters, hence no devices with generators
