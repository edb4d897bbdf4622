"""Plain-text output of rich renderables, and progress bars."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.progress import Progress


def printed(renderable: Any, width: int = 110) -> str:
    """Return ``renderable`` as plain text.

    In notebooks too, where rich would otherwise display it.
    """
    buffer = io.StringIO()
    Console(file=buffer, width=width, highlight=False, color_system=None, force_jupyter=False).print(renderable)
    return buffer.getvalue()


def terminal_width() -> int:
    """Return the columns of the terminal that is printed to; 120 if it is none, and never less than 60."""
    return max(60, shutil.get_terminal_size((120, 24)).columns)


_INSIDE = ContextVar("_INSIDE", default=False)
"""Whether a progress bar is shown, so that those of its parts are not."""


@contextmanager
def alone() -> Iterator[bool]:
    """Hide the progress bars of the block, and yield whether it is in no such block itself."""
    inside = _INSIDE.get()
    token = _INSIDE.set(True)
    try:
        yield not inside
    finally:
        _INSIDE.reset(token)


@contextmanager
def in_progress(steps: int | None, what: str, progress: bool = True) -> Iterator[Callable[[], None]]:
    """Show a progress bar with the time left on the error stream while the block runs, in a terminal only.

    Args:
        steps: number of steps; None if it is not known.
        what: description.
        progress: False for none.

    Yields:
        A function to call after each step.
    """
    console = Console(stderr=True)
    with (
        alone() as first,
        Progress(console=console, transient=True, disable=not (progress and first and console.is_terminal)) as bar,
    ):
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)
