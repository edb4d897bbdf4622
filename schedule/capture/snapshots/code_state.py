"""State used by a function besides its arguments: globals, closure variables, defaults.

The search includes the functions and methods named in its code: functions of its file, and methods of its class.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from schedule.util.caching import cached_by_class
from schedule.util.own_code import is_outside

_OURS = ("schedule", "fused")
_PLAIN_FROM = ("builtins", "collections", "types", "functools")
_PASSED_BY = (types.ModuleType, types.BuiltinFunctionType)


@functools.lru_cache(maxsize=8192)
def is_passed_by(cls: type) -> bool:
    """Check whether objects of ``cls`` are not searched: parts of torch and of this package."""
    if cls.__module__.partition(".")[0] == "torch":
        return True
    return any(base.__module__.partition(".")[0] in _OURS for base in cls.__mro__)


@functools.lru_cache(maxsize=8192)
def is_of_library(cls: type) -> bool:
    """Check whether ``cls`` is from the standard library.

    Its objects are searched, but not other standard-library objects inside them.
    """
    return cls.__module__ not in _PLAIN_FROM and is_outside(cls.__module__)


@functools.lru_cache(maxsize=16384)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names looked up in globals or on objects by ``code`` and by functions defined inside."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(names_in(constant))
    return tuple(found)


def function_in(member: Any) -> types.FunctionType | None:
    """Return the function behind a class member (a method, a property, a static method), or None."""
    member = getattr(member, "fget", member) if isinstance(member, property) else member
    member = getattr(member, "__func__", member) if isinstance(member, (staticmethod, classmethod)) else member
    return member if isinstance(member, types.FunctionType) else None


def globals_named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals named in ``function``, except modules, classes and library objects."""
    namespace = function.__globals__
    for name in names_in(function.__code__):
        if name in namespace and not name.startswith("__") and not _is_foreign(namespace[name]):
            yield name, namespace[name]


def classes_named(function: types.FunctionType) -> list[type]:
    """Return the user's classes named in ``function``."""
    found = (function.__globals__.get(name) for name in names_in(function.__code__))
    return [cls for cls in found if isinstance(cls, type) and not is_outside(cls.__module__)]


def _is_foreign(value: Any) -> bool:
    if isinstance(value, (*_PASSED_BY, type)):
        return True
    if isinstance(value, types.FunctionType):
        return is_outside(value.__module__)
    cls: Any = type(value)
    return is_passed_by(cls) or is_of_library(cls)


def members_named(cls: type, names: tuple[str, ...]) -> Iterator[tuple[type, str, Any]]:
    """Yield the members with these names of the user's classes in the MRO of ``cls``."""
    for base in cls.__mro__:
        if not is_outside(base.__module__):
            own = vars(base)
            yield from ((base, name, own[name]) for name in names if name in own)


@cached_by_class
def slots_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return the members made by ``__slots__``, with their names."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__slots__" in vars(base):
            found |= {name: member for name, member in vars(base).items() if _is_slot(member)}
    return tuple(found.items())


def _is_slot(member: Any) -> bool:
    return isinstance(member, types.MemberDescriptorType)
