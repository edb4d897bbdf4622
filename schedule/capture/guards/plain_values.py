"""Plain values, and containers and arrays of them: their parts, copies of them, and exact comparison."""

from __future__ import annotations

import array
import ctypes
import enum
import math
import numbers
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from schedule.capture.guards.origin import is_native_class
from schedule.capture.recording.structure import attributes_beside, is_dataclass_value

# -- Arrays of numbers, whose content is guarded as a whole -------------------------------------------------


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


# -- Plain values, and containers and arrays of them --------------------------------------------------------


ATOMS: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), range, type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
    *(enum.Enum, numbers.Number),
)
EXACT = {bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, torch.Size, torch.layout}
"""Types of values that have no attributes but their value's."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
_DECIMAL = ("decimal", "_decimal", "_pydecimal")
MOST = 256
"""Containers of more values than this are compared entry by entry, where they are read."""


def is_atom(value: Any) -> bool:
    """Check whether ``value`` is plain immutable data: a number, a string, a dtype, a tuple of these."""
    if isinstance(value, (tuple, frozenset)):
        return len(value) <= MOST and all(map(is_atom, value))
    if isinstance(value, numbers.Number) and not isinstance(value, (int, float, complex)):
        return is_native_class(type(value)) and not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return isinstance(value, ATOMS) and not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_plain_content(value: Any, count: int = MOST) -> bool:
    """Check whether ``value`` contains only atoms, functions, classes and such containers, at most ``count`` in all."""
    pending, seen = [value], 0
    while pending:
        item, seen = pending.pop(), seen + 1
        if seen > count:
            return False
        if type(item) in CONTAINERS or isinstance(item, (list, dict, set)):
            pending += [*item.keys(), *item.values()] if isinstance(item, dict) else item
        elif not (is_atom(item) or isinstance(item, (types.FunctionType, types.BuiltinFunctionType, type))):
            return False
    return True


def snapshot(value: Any) -> Any:
    """Copy a container of atoms, or an array, for :func:`same`."""
    if is_array(value):
        return _saved(value, numbers_of(value))
    if isinstance(value, dict):
        return _saved(value, {key: snapshot(item) for key, item in value.items()})
    if isinstance(value, (set, frozenset)):
        return _saved(value, set(value))
    if isinstance(value, (list, tuple, deque)) and not is_atom(value):
        return _saved(value, [snapshot(item) for item in value])
    return value


@dataclass(frozen=True)
class Snapshot:
    """Copy of a container or an array.

    Attributes:
        cls: its class.
        content: its items, as copies of their own.
    """

    cls: type
    content: Any


def _saved(value: Any, content: Any) -> Snapshot:
    return Snapshot(type(value), content)


def has_decimals(value: Any) -> bool:
    """Check whether ``value`` is a part of Python's ``decimal``, or a container or snapshot with such parts."""
    if isinstance(value, Snapshot):
        return has_decimals(value.content)
    if isinstance(value, dict):
        return any(map(has_decimals, (*value, *value.values())))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(has_decimals, value))
    if isinstance(value, types.ModuleType):
        return value.__name__ in _DECIMAL
    return (value if isinstance(value, (type, types.BuiltinFunctionType)) else type(value)).__module__ in _DECIMAL


def has_sign_of_zero(value: Any) -> bool:
    """Check whether ``value`` is a number whose sign of zero ``==`` does not tell."""
    return (isinstance(value, float) and value == 0) or isinstance(value, complex)


def equal(value: Any, expected: Any) -> bool:
    """Compare by ``==``, but tell 0.0 from -0.0, in a way that ``torch.compile`` follows."""
    return bool(value == expected) and (not has_sign_of_zero(expected) or str(value) == str(expected))


def same(value: Any, expected: Any) -> bool:
    """Check whether ``value`` equals ``expected``, in type too: 2 is not 2.0, 0.0 is not -0.0, nan is nan."""
    if value is expected:
        return True
    if isinstance(expected, Snapshot):
        return type(value) is expected.cls and _same_content(value, expected.content)
    if type(value) is not type(expected):
        return False
    if isinstance(value, float):
        return equal(value, expected) or (math.isnan(value) and math.isnan(expected))
    if isinstance(value, (tuple, list)):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, enum.Enum) or (isinstance(value, numbers.Number) and type(value) not in (int, bool)):
        return repr(value) == repr(expected)  # other numbers have a sign of zero and trailing digits too
    return isinstance(value, (*ATOMS, frozenset)) and bool(value == expected)


def _same_content(value: Any, content: Any) -> bool:
    if is_array(value):
        return bool(numbers_of(value) == content)
    if isinstance(content, dict):
        return len(value) == len(content) and all(
            same(key, own) and same(value[key], content[own]) for key, own in zip(value, content, strict=True)
        )
    if isinstance(content, set):
        return len(value) == len(content) and {(type(x), x) for x in value} == {(type(x), x) for x in content}
    return len(value) == len(content) and all(map(same, value, content))


# -- Parts of the values that a trace sees ------------------------------------------------------------------


class Placeholder:
    """Base of placeholders for objects. They have no parts: what is read of them becomes a node."""


class Tracked:
    """Base of the forms of lists and dicts in objects.

    Attributes:
        replaces: the class that the forward sees.
    """

    replaces: type

    def copy(self) -> Any:
        """Return a plain container of the forward's own, with guards on what it holds."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return bool(self.copy() == (other.copy() if isinstance(other, Tracked) else other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return repr(self.copy())

    __hash__ = None  # type: ignore[assignment]


def is_record(value: Any) -> bool:
    """Check whether ``value`` is an instance of a dataclass, and no placeholder for one."""
    return not isinstance(value, Placeholder) and is_dataclass_value(value)


def parts(value: Any) -> list[Any]:
    """Return the items of a container or the fields set in a dataclass, or none."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, dict):
        return [*value.values(), *attributes_beside(value).values()]
    fields = value.__dataclass_fields__ if is_record(value) else ()
    return [getattr(value, name) for name in fields if hasattr(value, name)]
