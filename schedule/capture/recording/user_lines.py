"""The current line of the user's code, and errors that name it."""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from schedule.util.errors import TraceError
from schedule.util.own_code import PACKAGES

_TORCH = str(Path(torch.__file__).parent) + os.sep
_NUMPY = str(Path(torch.__file__).parents[1] / "numpy") + os.sep
_HIDDEN = (*PACKAGES, _TORCH, _NUMPY, "<frozen", "<string>")
_STDLIB = {"contextlib.py", "functools.py", "mock.py"}


def outermost(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``forward``. :func:`user_line` ignores all frames outside of this call."""
    return forward(*args, **kwargs)


def user_frame() -> types.FrameType | None:
    """Return the innermost frame outside torch and this package, or None."""
    return _user_frame(sys._getframe(1))


def calling_frame(calls: int, module_call: types.CodeType) -> types.FrameType | None:
    """Return the frame so many calls of plain functions above :func:`user_frame`, or None if there is none.

    Args:
        calls: how many.
        module_call: the code that runs calls of modules, which have frames of torch in a run without tracing.
    """
    found = user_frame()
    for _ in range(calls):
        frame = None if found is None else found.f_back
        found = _user_frame(frame)
        while frame is not found and frame is not None:
            if frame.f_code is module_call or not frame.f_code.co_filename.startswith(PACKAGES):
                return None
            frame = frame.f_back
    return found


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and frame.f_code is not outermost.__code__:
        if _is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def user_line() -> str:
    """Return ``path:line in function`` of :func:`user_frame`, or ""."""
    frame = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame is not None else ""


def _raised_at(error: BaseException) -> str:
    """Return ``path:line in function`` of the innermost frame of ``error`` outside torch and this package, or ""."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [f"{code.co_filename}:{line} in {code.co_name}" for code, line in frames if _is_users(code.co_filename)]
    return users[-1] if users else ""


def _is_users(filename: str) -> bool:
    return not filename.startswith(_HIDDEN) and os.path.basename(filename) not in _STDLIB


def raised(error: Exception) -> TraceError:
    """Return the error for a forward that fails on tensors without data."""
    line = (str(error).strip().splitlines() or ["no message"])[0]
    return TraceError(
        f"the forward raises {type(error).__name__} on tensors without data: {line}",
        where=_raised_at(error),
        fix="keep the module that holds this line a leaf (`leaves=(…,)`), or schedule its submodules instead",
    )


class NeedsData(TraceError):
    """Error for Python code in need of values of a tensor, which were not recorded."""


def data_dependent(func: Any) -> NeedsData:
    """Return the error for Python code in need of the values of a tensor."""
    name = getattr(func, "__name__", str(func))
    return NeedsData(
        f"the forward needs the data of a tensor to go on ({name})",
        where=user_line(),
        fix="flatten less: keep the module that holds this line a leaf (`leaves=(…,)`), "
        "or schedule its submodules instead",
    )
