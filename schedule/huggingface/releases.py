"""Refuse a transformers older than the oldest supported release. Imported before its classes are."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from fused.versions import is_too_old, oldest


def refuse_old_transformers() -> None:
    """Raise ImportError if transformers is missing or too old."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = ""
    if not found or is_too_old("transformers", found):
        raise ImportError(
            f"schedule.huggingface needs transformers {oldest('transformers')} or newer, "
            f"and {f'{found} is installed' if found else 'it is not installed'} for {sys.executable}.\n"
            f"  fix: {sys.executable} -m pip install --upgrade 'transformers>={oldest('transformers')}'"
        )


refuse_old_transformers()
