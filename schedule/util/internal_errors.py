"""Errors of this package's own code, told apart from those of the user's code and of torch.

Whose error an exception is follows from its innermost frame. An exception raised in a file of ``schedule`` or
``fused``, or in the conditions that they generate, is ours; not so what a fused op raises about its arguments. Calls of
built-in code leave no frame: those made on behalf of the user's code go through :func:`perform`, and errors that Python
itself would have raised through :func:`as_python_does`.
"""

from __future__ import annotations

import dis
import functools
import os
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from fused.versions import untested_releases, versions_text
from schedule.util.errors import ScheduleError
from schedule.util.own_code import PACKAGES, is_outside

E = TypeVar("E", bound=BaseException)

INTERNAL = "internal error"
"""Beginning of the reason of every :class:`InternalError`."""
_GENERATED = ("<schedule dispatch", "<schedule check", "<schedule guards")
_MADE_METHODS = "<string>"
"""File of the methods that dataclasses and named tuples are given."""
_OUR_MODULES = ("schedule.", "fused.")
_FUSED = PACKAGES[1]
_DEEP = 20
"""Frames of one function in a traceback; modules in modules have a few."""
_OF_TENSORS = (RuntimeError, ValueError, IndexError)
"""Errors of torch's operations on tensors that do not fit."""
_RAISING = "FXSCHEDULE_INTERNAL_ERRORS"
_MARK = "_raised_for_the_user"
_told: set[str] = set()


class InternalErrorWarning(UserWarning):
    """An error of this package's own code was caught, and the model runs without what failed."""


class InternalError(ScheduleError):
    """This package failed where the user's model did not.

    The model is unchanged. The message names our file and line, and the versions in use.
    """

    @staticmethod
    def of(error: BaseException, doing: str = "") -> InternalError | None:
        """Return the internal error for an exception of our own code, or None for any other exception.

        Args:
            error: the exception.
            doing: what failed, such as ``tracing``.
        """
        if isinstance(error, ScheduleError):
            return error if isinstance(error, InternalError) else None
        if isinstance(error, RecursionError) and _recurs_outside(error):
            return None
        frame = _own_frame(error)
        if frame is None:
            return None
        line = (str(error).strip().splitlines() or ["no message"])[0]
        made = InternalError(
            f"{INTERNAL}{doing and f' while {doing}'}: {type(error).__name__}: {line}",
            where=frame,
            fix="\n".join((f"report it with the traceback and: {versions_text()}", *untested_releases())),
        )
        made.__cause__ = error
        return made


def perform(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` on behalf of the user's code: what it raises is not an error of ours."""
    return function(*args, **kwargs)


_PERFORMING = {perform.__code__}


def written_for_users(function: Any) -> None:
    """Take errors in the code of ``function``, a formula of ours, for those of a user's code.

    Functions bound in it are included.
    """
    if isinstance(function, functools.partial):
        for each in (function.func, *function.args):
            written_for_users(each)
    elif isinstance(function, types.FunctionType) and function.__code__ not in _PERFORMING:
        _PERFORMING.add(function.__code__)
        for cell in function.__closure__ or ():
            written_for_users(cell.cell_contents)


def as_python_does(error: E) -> E:
    """Mark an exception that Python itself would raise for the user's code."""
    setattr(error, _MARK, True)
    return error


def raise_if_own(error: BaseException) -> None:
    """Raise the :class:`InternalError` for an exception of our own code, which a handler took for the user's."""
    internal = InternalError.of(error)
    if internal is not None:
        raise internal from error


class own_errors:
    """Raise an :class:`InternalError` in place of an exception of our own code in the block; others pass.

    Args:
        doing: what is done in the block, such as ``tracing``.
    """

    def __init__(self, doing: str = "") -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        internal = InternalError.of(error, self._doing) if isinstance(error, Exception) else None
        if internal is not None and internal is not error:
            raise internal from error


def contained(error: InternalError) -> InternalError:
    """Warn of an internal error that the caller goes on without, once per line of our code, and return it.

    Raises:
        InternalError: the environment variable ``FXSCHEDULE_INTERNAL_ERRORS`` is ``raise``, as in our tests.
    """
    if os.environ.get(_RAISING) == "raise":
        raise error
    if error.where not in _told:
        _told.add(error.where)
        warnings.warn(f"{error}\nThe model goes on without what failed.", InternalErrorWarning, stacklevel=3)
    return error


def is_generated(error: BaseException) -> bool:
    """Check whether the innermost frame of ``error`` is one of generated conditions."""
    found = _innermost(error)
    return found is not None and found.tb_frame.f_code.co_filename.startswith(_GENERATED)


def _is_raise(code: types.CodeType, instruction: int) -> bool:
    return code.co_code[instruction] == dis.opmap["RAISE_VARARGS"]


def _innermost(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of the innermost frame of ``error``, or None if it was never raised."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    return found


def _recurs_outside(error: RecursionError) -> bool:
    """Check whether a user's function runs inside itself: which frame then meets the limit tells nothing."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = Counter(frame.f_code for frame in frames if not is_outside(frame.f_globals.get("__name__")))
    return max(users.values(), default=0) > _DEEP


def _own_frame(error: BaseException) -> str | None:
    """Return ``path:line in function`` of the innermost frame of ``error`` if it is ours, else None."""
    found = _innermost(error)
    if found is None or getattr(error, _MARK, False):
        return None
    code, names = found.tb_frame.f_code, found.tb_frame.f_globals
    of_our_classes = code.co_filename == _MADE_METHODS and str(names.get("__name__")).startswith(_OUR_MODULES)
    if code in _PERFORMING or not (of_our_classes or code.co_filename.startswith((*PACKAGES, *_GENERATED))):
        return None
    if code.co_filename.startswith(_FUSED) and (isinstance(error, _OF_TENSORS) or _is_raise(code, found.tb_lasti)):
        return None  # about the tensors that an op was given
    return f"{code.co_filename}:{found.tb_lineno} in {code.co_qualname}"
