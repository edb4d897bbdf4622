"""Plain-text output of rich renderables, and progress bars."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def in_progress(steps: int, what: str) -> Iterator[Callable[[], None]]:
    """Show a progress bar on the error stream while the block runs, in a terminal only.

    Args:
        steps: number of steps.
        what: description.

    Yields:
        A function to call after each step.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)
