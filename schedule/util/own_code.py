"""What code is the package's, torch's or Python's own, and what is the user's."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

PACKAGES = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("schedule", "fused"))
"""Folders of the package's source files."""

_OURS = ("torch", "schedule", "fused", "fxschedule")


@functools.cache
def is_outside(module: str | None) -> bool:
    """Check whether a Python module is library code: torch, the standard library, or this package."""
    top = (module or "builtins").partition(".")[0]
    return top in _OURS or (top in sys.stdlib_module_names and top != "__main__")
