"""Which line of the user's code is running."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_NUMPY = str(Path(torch.__file__).resolve().parents[1] / "numpy") + os.sep
_HIDDEN = (_OURS, _TORCH, _NUMPY, "<frozen", "<string>")
_STDLIB = {"contextlib.py", "functools.py", "mock.py"}


def outermost(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``forward``; lines further out than this call are not its own, and :func:`user_line` passes over them."""
    return forward(*args, **kwargs)


def user_line() -> str:
    """``path:line in function`` of the innermost frame outside torch and this package; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost.__code__:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def raised_at(error: BaseException) -> str:
    """``path:line in function`` of the innermost frame outside torch and this package that ``error`` came through."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [f"{code.co_filename}:{line} in {code.co_name}" for code, line in frames if _is_users(code.co_filename)]
    return users[-1] if users else ""


def _is_users(filename: str) -> bool:
    return not filename.startswith(_HIDDEN) and os.path.basename(filename) not in _STDLIB
