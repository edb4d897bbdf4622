"""Calls of user code with any exception wrapped in :class:`UserCodeError`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from schedule.util.errors import NotApplicable, ScheduleError
from schedule.util.internal_errors import InternalError, as_python_does


class UserCodeError(Exception):
    """Wrapper of an exception raised by user code.

    Attributes:
        error: the exception raised by user code.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def raised_by(error: ScheduleError | UserCodeError) -> Exception:
    """Return what was raised under :func:`user_code`, without the wrapper."""
    return error.error if isinstance(error, UserCodeError) else error


def refused_batch(model: nn.Module, why: str, failed: UserCodeError, further: str = "") -> NotApplicable:
    """Return the error for a batch that ``model`` does not take; ``why`` is ``the model refused the batch``."""
    return NotApplicable(
        f"{why}: {failed}",
        where=f"{type(model).__name__}.forward{inspect.signature(type(model).forward)}",
        fix=f"pass a batch that `model(**batch)` accepts{further}",
    )


@contextmanager
def user_code(passing: type[Exception] = ScheduleError) -> Iterator[None]:
    """Raise a :class:`UserCodeError` in place of any other exception, and :class:`InternalError` of one of our own.

    Args:
        passing: exceptions raised unchanged.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        if (internal := InternalError.of(error)) is not None:
            raise internal from error
        raise as_python_does(UserCodeError(error)) from error
