"""Plain values, and containers and arrays of them: what they are, copies of them, and exact comparison."""

from __future__ import annotations

import enum
import math
import numbers
import types
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from schedule.capture.tracing.reading.arrays import is_array, numbers_of
from schedule.capture.tracing.reading.origin import is_native_class

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
