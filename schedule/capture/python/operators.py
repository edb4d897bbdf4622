"""Operators of the user's objects: their special methods are followed, as calls are."""

from __future__ import annotations

import builtins
import math
import operator
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

from schedule.capture.guards.origin import is_native, is_native_class
from schedule.util.caching import cached_by_class
from schedule.util.internal_errors import perform

_BINARY: tuple[str, ...] = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
_BINARY += ("lshift", "rshift", "and", "or", "xor")
_NUMERIC = ("neg", "pos", "abs", "invert", "float", "int", "complex", "index", "round", "trunc", "floor", "ceil")
_ORDER = ("lt", "le", "gt", "ge", "eq", "ne")
_TEXT = ("str", "repr", "format", "bytes")
NAMES = tuple(
    f"__{name}__"
    for name in (*_BINARY, *(f"r{n}" for n in _BINARY), *(f"i{n}" for n in _BINARY), *_NUMERIC, *_ORDER, *_TEXT)
)
"""Special methods that an operator, a conversion or a comparison calls."""

_CONVERSIONS = {float, int, complex, str, bytes, abs, round, repr, format, divmod, pow, ascii}
_CONVERTING_MODULES = {math.__name__, operator.__name__, "_operator"}
COMPARING = {sorted, min, max, sum, any, all, set, frozenset, dict.fromkeys}
"""Native functions that call special methods of the items of a container."""


class Methods(Protocol):
    """The lookup of special methods to follow."""

    def python_method(self, value: Any, name: str) -> Callable[..., Any] | None:
        """Return a special method of ``value`` written in Python, to be followed, or None."""


@cached_by_class
def has_operators(cls: type) -> bool:
    """Check whether objects of ``cls`` have operators that are written in the user's Python."""
    if is_native_class(cls) or issubclass(cls, (torch.Tensor, torch.nn.Module, BaseException)):
        return False
    methods = (vars(base).get(name) for base in cls.__mro__ for name in (*NAMES, "__hash__"))
    return any(isinstance(method, types.FunctionType) and not is_native(method) for method in methods)


def converts(function: Any) -> bool:
    """Check whether a native function calls special methods of its arguments, and keeps none of them."""
    if isinstance(function, type):
        return function in _CONVERSIONS
    module = getattr(function, "__module__", None)
    if module in _CONVERTING_MODULES:
        return True
    return module == builtins.__name__ and getattr(function, "__self__", None) is builtins and function in _CONVERSIONS


class Operand:
    """One of the user's objects in an expression: Python calls its special methods, which are followed."""

    __slots__ = ("_methods", "_value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, methods: Methods, value: Any) -> None:
        self._methods, self._value = methods, value


def plain(value: Any) -> Any:
    """Return the object of an :class:`Operand`; anything else as it is."""
    return value._value if isinstance(value, Operand) else value


def _special(name: str) -> Callable[..., Any]:
    def method(self: Operand, *args: Any) -> Any:
        value, given = self._value, tuple(map(plain, args))
        found = self._methods.python_method(value, name)
        if found is not None:
            return found(*given)
        if name == "__format__" and type(value).__format__ is object.__format__:
            return perform(format, str(self), *given)
        if name == "__str__" and type(value).__str__ is object.__str__:
            return repr(self)
        native = getattr(type(value), name, None)
        return NotImplemented if native is None else perform(native, value, *given)

    method.__name__ = name
    return method


for _name in NAMES:
    setattr(Operand, _name, _special(_name))
