"""Plain-text output of rich renderables."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console


def printed(renderable: Any, width: int = 110) -> str:
    """Return ``renderable`` as plain text.

    In notebooks too, where rich would otherwise display it.
    """
    buffer = io.StringIO()
    Console(file=buffer, width=width, highlight=False, color_system=None, force_jupyter=False).print(renderable)
    return buffer.getvalue()
