"""The context of Python's ``decimal``, which operators and functions of decimals read without naming it."""

from __future__ import annotations

import decimal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from schedule.capture.tracing.reading.plain import Snapshot
from schedule.util.errors import TraceError

_MODULES = ("decimal", "_decimal", "_pydecimal")


def has_decimals(value: Any) -> bool:
    """Check whether ``value`` is a part of ``decimal``, or a container or snapshot with such parts."""
    if isinstance(value, Snapshot):
        return has_decimals(value.content)
    if isinstance(value, dict):
        return any(map(has_decimals, (*value, *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(has_decimals, value))
    if isinstance(value, types.ModuleType):
        return value.__name__ in _MODULES
    owner = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    return owner.__module__ in _MODULES


def context_settings() -> tuple[Any, ...]:
    """Return all settings of the current context of ``decimal``, without its flags."""
    context = decimal.getcontext()
    numbers = (context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp)
    return (*numbers, *context.traps.values())


@contextmanager
def refusing_flags() -> Iterator[None]:
    """Run the block in a context of its own, and refuse a forward that sets flags in it.

    Raises:
        TraceError: a result was rounded or out of range, which a flag of the context says.
    """
    with decimal.localcontext() as context:
        context.clear_flags()
        yield
        flags = [flag.__name__ for flag, is_set in context.flags.items() if is_set]
    if flags:
        raise TraceError(
            f"the forward computes with decimals and sets flags of decimal's context ({', '.join(flags)}), which its "
            "graph would not set",
            fix="compute the number before the call, or keep the module that computes it a leaf (`leaves=(…,)`)",
        )
