"""Something around what a module runs, whichever graph or forward that is: recomputation, other random numbers.

The module's hooks stay outside, and run once. What is around the original forward is around its graphs too, those
that it has and those that primitives make later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

from torch import nn

from schedule.capture.tracing.specialization import Specialization
from schedule.runtime.scheduled import forward_of

Run = Callable[..., Any]


class Wrapper(Protocol):
    """What runs a call in its own way; copies and pickles with the module."""

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``run(*args, **kwargs)``, with something before, after or instead."""


class WrappedForward:
    """A forward with something around it."""

    def __init__(self, inner: Run, wrapper: Wrapper) -> None:
        self.inner, self.wrapper = inner, wrapper
        self.__qualname__ = getattr(inner, "__qualname__", "forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the forward, the module first."""
        return self.wrapper(self.inner, args, kwargs)


@dataclass(frozen=True)
class WrappedSpecialization(Specialization):
    """A graph with something around it, outermost last."""

    wrappers: tuple[Wrapper, ...] = ()

    @cached_property
    def function(self) -> Run:
        """The graph as a function of ``(module, *inputs)``, with all of it around."""
        return rewrapped(super().function, self.wrappers)


def wrapped(made: Specialization, wrappers: Iterable[Wrapper]) -> Specialization:
    """``made`` with ``wrappers`` around what is around it already."""
    added = tuple(wrappers)
    if not added:
        return made
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    values["wrappers"] = (*values.get("wrappers", ()), *added)
    return WrappedSpecialization(**values)


def unwrapped(forward: Run) -> tuple[Run, tuple[Wrapper, ...]]:
    """A forward without what is around it, and that, innermost first."""
    wrappers: list[Wrapper] = []
    while isinstance(forward, WrappedForward):
        wrappers.insert(0, forward.wrapper)
        forward = forward.inner
    return forward, tuple(wrappers)


def rewrapped(forward: Run, wrappers: Iterable[Wrapper]) -> Run:
    """``forward`` with ``wrappers`` around it, outermost last."""
    for wrapper in wrappers:
        forward = WrappedForward(forward, wrapper)
    return forward


def wrappers_of(module: nn.Module) -> tuple[Wrapper, ...]:
    """What is around the calls of ``module``, innermost first."""
    return unwrapped(forward_of(module))[1]
