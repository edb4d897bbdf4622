"""Check that what the package needs is installed. Imported first, before anything that would fail for lack of it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

REQUIRED = ("torch", "networkx", "rich", "jinja2", "typer")


def refuse_missing() -> None:
    """Raise ImportError if a required package is missing."""
    missing = [name for name in REQUIRED if not _is_installed(name)]
    if missing:
        names = " ".join(missing)
        raise ImportError(
            f"fxschedule needs {', '.join(missing)}, not installed for {sys.executable}.\n"
            f"  fix: {sys.executable} -m pip install {names}"
        )


def _is_installed(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except ImportError:
        return False


refuse_missing()
