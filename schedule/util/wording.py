"""Formatting of numbers in messages and reports."""

from __future__ import annotations


def counted(count: int, what: str, several: str = "") -> str:
    """Return a count with its noun, such as ``1 place`` or ``2 places``.

    Args:
        count: the number.
        what: the singular noun.
        several: the plural noun, if it is not the singular with an s.
    """
    return f"{count} {what if count == 1 else several or what + 's'}"


def size_text(count: float) -> str:
    """Format a number of bytes with a suitable unit, such as ``1.122 MB``."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def seconds_text(seconds: float) -> str:
    """Format a time with a suitable unit, such as ``12.1 ms``."""
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1000 * seconds:.1f} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.0f} µs"
    )
