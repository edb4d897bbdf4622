"""Functions of Python's numbers without support for torch's symbolic ones: ``divmod``, ``round`` to digits, formats.

A graph computes the numbers that they return at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedule.capture.tracing.reading.evaluator import Evaluator
from schedule.capture.tracing.reading.following import Handler
from schedule.capture.tracing.scalars import computed, scalar_of


def _shown(ev: Evaluator, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*map(ev.shown, args), **{name: ev.shown(value) for name, value in kwargs.items()})


def _of_numbers(function: Callable[..., Any], parameters: tuple[str, ...], least: int) -> Handler:
    """Return a handler of a function without support for symbolic numbers from ``least`` arguments on."""

    def handler(ev: Evaluator, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *(kwargs[name] for name in parameters[len(args) :] if name in kwargs))
        if len(given) >= least and any(scalar_of(each) is not None for each in given):
            return computed(ev.tracer, function, *given)
        return _shown(ev, function, *args, **kwargs)

    return handler


def _divmod(ev: Evaluator, number: Any, by: Any) -> Any:
    if scalar_of(number) is None and scalar_of(by) is None:
        return _shown(ev, divmod, number, by)
    return number // by, number % by


def _format(ev: Evaluator, value: Any, *specification: Any) -> Any:
    return format(ev.displayed(value), *specification)


NUMBER_HANDLERS: dict[Any, Handler] = {
    divmod: _divmod,
    format: _format,
    pow: _of_numbers(pow, ("base", "exp", "mod"), 3),
    round: _of_numbers(round, ("number", "ndigits"), 2),
}
"""Handlers of the builtins for numbers."""
