"""Code of the user, which may raise anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schedule.util.errors import ScheduleError


class UserCodeError(Exception):
    """An exception that code of the user raised.

    Attributes:
        error: that exception.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@contextmanager
def user_code(passing: type[Exception] = ScheduleError) -> Iterator[None]:
    """Raise a :class:`UserCodeError` in place of any other exception.

    Args:
        passing: exceptions that pass as they are.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        raise UserCodeError(error) from error
