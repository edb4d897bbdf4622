"""Sweeps over every architecture."""

from __future__ import annotations

REFUSALS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    NameError,
    ImportError,
    ZeroDivisionError,
)
"""Exceptions that a model raises for a batch it does not accept."""
