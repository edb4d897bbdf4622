"""Messages of a forward (``print``, ``warnings.warn``, log messages) as nodes that write them at each call."""

from __future__ import annotations

import logging
import sys
import types
import warnings
from pkgutil import resolve_name
from typing import Any

from schedule.capture.recording.user_lines import calling_frame, user_frame

MESSAGE_METHODS: dict[str, int | None] = {
    **{name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")},
    **{"warn": logging.WARNING, "fatal": logging.CRITICAL, "exception": logging.ERROR, "log": None},
}
"""Methods of a logger that write a message, with their level; ``log`` takes it as an argument."""
_PLAIN = (str, int, float, bool, type(None))


def warn_at(message: str, category: str, filename: str, line: int, module: str) -> None:
    """Issue a warning as from a line of the forward, so that ``once`` and ``default`` filters count it there."""
    registry = vars(sys.modules[module]).setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, resolve_name(category), filename, line, module, registry)


def log_at(logger: str, level: int, message: str, args: tuple[Any, ...], filename: str, line: int, name: str) -> None:
    """Log a message as from a line of the function ``name``."""
    found = logging.getLogger(logger)
    if found.isEnabledFor(level):
        found.handle(found.makeRecord(logger, level, filename, line, message, args, None, name))


MESSAGES = frozenset({print, warn_at, log_at})


def print_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether ``print(*args, **kwargs)`` prints the same at each call."""
    return _are_plain(args) and _are_plain(kwargs.values())


def warn_arguments(
    module_call: types.CodeType, message: Any, category: Any = None, stacklevel: int = 1, **others: Any
) -> tuple[Any, ...] | None:
    """Return the arguments of :func:`warn_at` for a call of ``warnings.warn``, or None if it cannot be repeated."""
    category = UserWarning if category is None else category
    frame = calling_frame(stacklevel - 1, module_call) if type(stacklevel) is int else None
    if others or not _are_plain([message]) or frame is None:
        return None
    module, name = frame.f_globals.get("__name__"), f"{category.__module__}:{category.__qualname__}"
    if module not in sys.modules or "<locals>" in name:
        return None
    return message, name, frame.f_code.co_filename, frame.f_lineno, module


def log_arguments(logger: logging.Logger, level: int, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...] | None:
    """Return the arguments of :func:`log_at` for a call of a logger's method, or None if it cannot be repeated."""
    frame = user_frame()
    if kwargs or not args or not _are_plain(args) or frame is None or logging.getLogger(logger.name) is not logger:
        return None
    code = frame.f_code
    return logger.name, level, args[0], args[1:], code.co_filename, frame.f_lineno, code.co_name


def _are_plain(values: Any) -> bool:
    return all(type(value) in _PLAIN for value in values)
