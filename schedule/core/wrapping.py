"""Wrappers of a module's forward and graphs, such as recomputation or separate random numbers.

The module's hooks stay outside the wrappers and run once. A wrapper of the original forward also wraps its graphs, the
present ones and those made by later primitives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

from torch import nn

from schedule.capture import Specialization
from schedule.runtime.scheduled import forward_of

Run = Callable[..., Any]


class Wrapper(Protocol):
    """Custom way to run a call, copied and pickled with the module."""

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``run(*args, **kwargs)``, with work before or after it, or something else instead."""


class WrappedForward:
    """A forward with a wrapper."""

    def __init__(self, inner: Run, wrapper: Wrapper) -> None:
        self.inner, self.wrapper = inner, wrapper
        self.__qualname__ = getattr(inner, "__qualname__", "forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward through the wrapper, with the module as first argument."""
        return self.wrapper(self.inner, args, kwargs)


@dataclass(frozen=True)
class WrappedSpecialization(Specialization):
    """A graph with wrappers, outermost last."""

    wrappers: tuple[Wrapper, ...] = ()

    @cached_property
    def function(self) -> Run:
        """The graph as a function of ``(module, *inputs)``, inside all wrappers."""
        return rewrapped(super().function, self.wrappers)


def wrapped(made: Specialization, wrappers: Iterable[Wrapper]) -> Specialization:
    """Add ``wrappers`` to ``made``, outside of its present ones."""
    added = tuple(wrappers)
    if not added:
        return made
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    values["wrappers"] = (*values.get("wrappers", ()), *added)
    return WrappedSpecialization(**values)


def unwrapped(forward: Run) -> tuple[Run, tuple[Wrapper, ...]]:
    """Split a forward into the innermost forward and its wrappers, innermost first."""
    wrappers: list[Wrapper] = []
    while isinstance(forward, WrappedForward):
        wrappers.insert(0, forward.wrapper)
        forward = forward.inner
    return forward, tuple(wrappers)


def rewrapped(forward: Run, wrappers: Iterable[Wrapper]) -> Run:
    """Wrap ``forward`` in ``wrappers``, outermost last."""
    for wrapper in wrappers:
        forward = WrappedForward(forward, wrapper)
    return forward


def wrappers_of(module: nn.Module) -> tuple[Wrapper, ...]:
    """Return the wrappers of the forward of ``module``, innermost first."""
    return unwrapped(forward_of(module))[1]
