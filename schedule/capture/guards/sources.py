"""Sources of values read by a forward.

A source leads from the module, step by step, to the value at a later call.

Sources in code that this package or torch.fx generates, and makes again in another process.
"""

from __future__ import annotations

import copyreg
import enum
import importlib
import operator
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from schedule.util.internal_errors import perform

# -- Sources of values read by a forward --------------------------------------------------------------------


@dataclass(frozen=True)
class Self:
    """The traced module."""


@dataclass(frozen=True, eq=False)
class Const:
    """An object identical at every call, such as a class, or the globals of a file.

    Attributes:
        value: the object.
        found: the source that another process finds it at, if no name does; None if unknown.
    """

    value: Any
    found: Source | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class DictOf:
    """``base.__dict__``."""

    base: Source


@dataclass(frozen=True)
class Item:
    """``base[key]``."""

    base: Source
    key: Any


@dataclass(frozen=True)
class Attr:
    """``base.name``."""

    base: Source
    name: str


@dataclass(frozen=True, eq=False)
class Query:
    """``function(*arguments)``: a query to the process, such as ``torch.is_grad_enabled()``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Query) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> Any:
        function = self.function if isinstance(self.function, _METHODS) else id(self.function)
        return function, _identity(self.arguments)


_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
"""Bound methods, which are made anew each time that they are looked up, and equal if those of one object."""
_LITERALS = (bool, int, float, complex, str, bytes, types.NoneType)


def _identity(argument: Any) -> Any:
    """Return what tells an argument from others: 1 from ``True``; objects, which need not hash, by identity."""
    if isinstance(argument, tuple):
        return type(argument), tuple(map(_identity, argument))
    return (type(argument), repr(argument)) if type(argument) in _LITERALS else id(argument)


Source = Self | Const | DictOf | Item | Attr | Query


def root(source: Source) -> Self | Const | Query:
    """Return the first step of ``source``."""
    while isinstance(source, (DictOf, Item, Attr)):
        source = source.base
    return source


def value_at(source: Source) -> Any:
    """Return the value at a source that does not begin at a module."""
    if isinstance(source, Const):
        return source.value
    if isinstance(source, Query):
        return perform(source.function, *source.arguments)
    base = value_at(source.base)  # type: ignore[union-attr]
    if isinstance(source, DictOf):
        return perform(getattr, base, "__dict__")
    if isinstance(source, Attr):
        return perform(getattr, base, source.name)
    return perform(operator.getitem, base, source.key)  # type: ignore[union-attr]


SELF = Self()


def asks_torch(source: Source) -> bool:
    """Check whether the value at ``source`` is that of a query or an attribute of ``torch.backends``."""
    start = root(source)
    owner = getattr(start.value, "__name__", None) if isinstance(start, Const) else None
    return isinstance(start, Query) or (isinstance(owner, str) and owner.startswith("torch.backends."))


def described(source: Source) -> str:
    """Return ``source`` as a user would write it, for messages."""
    if isinstance(source, Self):
        return "self"
    if isinstance(source, Const):
        value = source.value
        name = value.get("__name__") if isinstance(value, dict) else getattr(value, "__name__", None)
        return type(value).__name__ if name is None else str(name)
    if isinstance(source, Query):
        return f"{getattr(source.function, '__name__', source.function)}{source.arguments!r}"
    base = described(source.base)
    if isinstance(source, DictOf):
        return base
    if isinstance(source, Attr):
        return f"{base}.{source.name}"
    if source.key in ("_modules", "_parameters", "_buffers"):
        return base
    inner = source.base.base if isinstance(source.base, Item) and isinstance(source.base.base, DictOf) else source.base
    is_global = isinstance(inner, Const) and isinstance(inner.value, dict) and "__name__" in inner.value
    return f"{base}.{source.key}" if isinstance(inner, DictOf) or is_global else f"{base}[{source.key!r}]"


def module_path(source: Source | None) -> tuple[str, str] | None:
    """Return ``(path, name)`` of a parameter, buffer or attribute of a module in the tree, or None for others."""
    if not isinstance(source, Item):
        return None
    table = source.base
    if isinstance(table, Item) and table.key in ("_parameters", "_buffers") and isinstance(table.base, DictOf):
        table = table.base
    if not isinstance(table, DictOf):
        return None
    owner = submodule_path(table.base)
    return None if owner is None else (owner, str(source.key))


def submodule_path(source: Source) -> str | None:
    """Return the path of a submodule, "" for the module itself, or None for anything else."""
    parts: list[str] = []
    while not isinstance(source, Self):
        table = source.base if isinstance(source, Item) else None
        if not (isinstance(table, Item) and table.key == "_modules" and isinstance(table.base, DictOf)):
            return None
        parts.insert(0, str(source.key))  # type: ignore[union-attr]
        source = table.base.base
    return ".".join(parts)


def submodule_source(path: str) -> Source:
    """Return the source of the submodule at ``path``, the module itself if it is empty."""
    source: Source = SELF
    for part in filter(None, path.split(".")):
        source = Item(Item(DictOf(source), "_modules"), part)
    return source


# -- pickling -----------------------------------------------------------------------------------------------


def _packed_const(const: Const) -> Any:
    value = const.value
    if isinstance(value, types.ModuleType):
        return _const_module, (value.__name__,)
    if value is sys.modules:
        return _const_modules, ()
    if isinstance(value, dict):
        name = _name_of_globals(value)
        if name is None:
            raise pickle.PicklingError("a dict that is not the globals of a file")
        return _const_globals, (name,)
    if has_name(value) or type(value) in _VALUES or isinstance(value, enum.Enum):
        return Const, (value,)
    if const.found is None or isinstance(root(const.found), Self):
        raise pickle.PicklingError(f"a {type(value).__name__} that no name leads to")
    return _const_at, (const.found,)


_VALUES = (bool, int, float, complex, str, bytes, tuple, type(None))


def has_name(value: Any) -> bool:
    """Check whether ``value`` is found again by the name of its Python module and its own."""
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    try:
        return pickle.loads(pickle.dumps(value)) is value
    except (pickle.PickleError, AttributeError, TypeError, ImportError):
        return False


def _const_at(source: Source) -> Const:
    return Const(value_at(source), source)


def _name_of_globals(table: dict[Any, Any]) -> str | None:
    """Return the name of the Python module with these globals; some say another one than they are imported by."""
    names = (table.get("__name__"), *tuple(sys.modules))
    return next((name for name in names if getattr(sys.modules.get(name), "__dict__", None) is table), None)  # type: ignore[arg-type]


def _const_module(name: str) -> Const:
    return Const(importlib.import_module(name))


def _const_modules() -> Const:
    return Const(sys.modules)


def _const_globals(name: str) -> Const:
    return Const(vars(_const_module(name).value))


copyreg.pickle(Const, _packed_const)


# -- Sources in code that this package or torch.fx generates ------------------------------------------------


def leads_from_generated(source: Source) -> bool:
    """Check whether ``source`` begins at a generated class, function, or globals."""
    start = root(source)
    return isinstance(start, Const) and (_is_generated(start.value) or _is_found_on_generated(start))


def _is_found_on_generated(const: Const) -> bool:
    start = None if const.found is None else root(const.found)
    return isinstance(start, Query) and any(map(_is_generated, start.arguments))


def _is_generated(value: Any) -> bool:
    if isinstance(value, type):
        return "_schedule_original" in vars(value) or (
            issubclass(value, fx.GraphModule) and value is not fx.GraphModule
        )
    if isinstance(value, dict):
        return "__builtins__" in value and "__name__" not in value
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith("<eval_with_key>")
