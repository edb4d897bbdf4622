"""Arrays of numbers, whose content is guarded as a whole."""

from __future__ import annotations

import array
import ctypes
import numbers
from typing import Any

_CTYPES = (ctypes.Array, ctypes.Structure, ctypes.Union, *ctypes.c_int.__mro__[1:2])


def is_array(value: Any) -> bool:
    """Check whether ``value`` is an array of numbers: of numpy, ``array`` or ctypes, a ``bytearray``, or a view."""
    if type(value).__module__ == "numpy":
        is_number = isinstance(value, numbers.Number)
        return hasattr(value, "tobytes") and not is_number and not holds_objects(value)
    return isinstance(value, (bytearray, memoryview, array.array, *_CTYPES))


def holds_objects(value: Any) -> bool:
    """Check whether ``value`` is an array of numpy that holds references to Python objects."""
    return type(value).__module__ == "numpy" and bool(getattr(getattr(value, "dtype", None), "hasobject", False))


def numbers_of(value: Any) -> tuple[Any, ...]:
    """Return the shape, kind and bytes of an array."""
    if type(value).__module__ == "numpy":
        return value.shape, str(value.dtype), value.tobytes()
    view = memoryview(value)
    return view.shape, view.format, view.tobytes()
