"""Formatting of numbers in messages and reports."""

from __future__ import annotations

import re

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

Bytes = int | float | str
"""A number of bytes, or a text such as ``"24GB"``."""


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


def bytes_of(size: object) -> int | None:
    """Return a number of bytes from a number or a text such as ``"24GB"`` or ``"1.5 GiB"``; None for anything else."""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", size.lower())
        unit = _UNITS.get(found[2]) if found else None
        return round(float(found[1]) * unit) if found and unit else None
    if isinstance(size, bool) or not isinstance(size, (int, float)) or size != int(size):
        return None
    return int(size)


def seconds_text(seconds: float) -> str:
    """Format a time with a suitable unit, such as ``12.1 ms``."""
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1000 * seconds:.1f} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.0f} µs"
    )
