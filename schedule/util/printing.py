"""What rich draws, as plain text."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console


def printed(renderable: Any, width: int = 110) -> str:
    """``renderable`` as plain text, in notebooks too, where rich would show it instead."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, highlight=False, color_system=None, force_jupyter=False).print(renderable)
    return buffer.getvalue()
