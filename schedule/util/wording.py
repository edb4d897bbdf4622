"""Numbers as messages and reports write them."""

from __future__ import annotations


def counted(count: int, what: str, several: str = "") -> str:
    """``1 place``, ``2 places``.

    Args:
        count: how many.
        what: the word for one.
        several: the word for more, if it is not that with an s.
    """
    return f"{count} {what if count == 1 else several or what + 's'}"


def size_text(count: float) -> str:
    """Bytes in the unit that suits, such as ``1.122 MB``."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
