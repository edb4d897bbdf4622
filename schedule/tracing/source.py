"""Which line of the user's code is running."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_HIDDEN = (_OURS, _TORCH, "<frozen", "<string>")
_STDLIB = {"contextlib.py", "functools.py", "mock.py"}


def user_line() -> str:
    """``path:line in function`` of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_HIDDEN) and os.path.basename(filename) not in _STDLIB:
            return f"{filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
