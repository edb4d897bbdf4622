"""Which line of the user's code is running."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_HIDDEN = (_OURS, _TORCH, "<frozen", "<string>")
_STDLIB = {"contextlib.py", "functools.py", "mock.py"}


def outermost(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``forward``; lines further out than this call are not its own, and :func:`user_line` passes over them."""
    return forward(*args, **kwargs)


def user_line() -> str:
    """``path:line in function`` of the innermost frame outside torch and this package; "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost.__code__:
        filename = frame.f_code.co_filename
        if not filename.startswith(_HIDDEN) and os.path.basename(filename) not in _STDLIB:
            return f"{filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
