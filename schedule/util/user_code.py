"""Calls of user code with any exception wrapped in :class:`UserCodeError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schedule.util.errors import ScheduleError


class UserCodeError(Exception):
    """Wrapper of an exception raised by user code.

    Attributes:
        error: the exception raised by user code.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@contextmanager
def user_code(passing: type[Exception] = ScheduleError) -> Iterator[None]:
    """Raise a :class:`UserCodeError` in place of any other exception.

    Args:
        passing: exceptions raised unchanged.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        raise UserCodeError(error) from error
