"""The table of handlers: implementations of builtins for values from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedule.capture.tracing.reading.following import Handler

HANDLERS: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler of ``functions``."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register
