"""Sources that ``torch.compile`` can follow and guard on by itself."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from schedule.capture.guards.sources import Attr, Const, DictOf, Item, Query, Self, Source, root, value_at
from schedule.util.internal_errors import raise_if_own

_COMPARED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.dtype, enum.Enum)
_NOT_USERS = {"torch", *sys.stdlib_module_names}
_MANY = 32
_OF_COMPILERS = ("torch.compiler", "torch._dynamo", "torch.jit", "torch.fx")


def asks_compiler(source: Source) -> bool:
    """Check whether the value says if a compiler or tracer is active: under one it is another."""
    start = root(source)
    return isinstance(start, Query) and str(getattr(start.function, "__module__", "")).startswith(_OF_COMPILERS)


def is_compared(value: Any) -> bool:
    """Check whether ``torch.compile`` can tell if another object is this one.

    It replaces some functions of the standard library, such as ``dataclasses.fields``, and cannot compare those.
    """
    where = str(getattr(value, "__module__", "")).partition(".")[0]
    return isinstance(value, _COMPARED) and where not in sys.stdlib_module_names


def is_plain(value: Any) -> bool:
    """Check whether ``torch.compile`` compares ``value`` by its type and value."""
    plain = value is None or isinstance(value, (bool, int, float, str, tuple))
    return plain and bool(value == value)


def is_followed(source: Source) -> bool:
    """Check whether ``torch.compile`` follows a read of the value, so that it sees changes in the compiled code.

    It follows dictionaries and items from the module or a global, attributes of classes and Python modules, closures,
    and queries to torch.
    """
    if isinstance(source, Self) or global_name(source) or cell_of(source) or attribute_owner(source) is not None:
        return True
    if isinstance(source, Query):
        return str(getattr(source.function, "__module__", "")).partition(".")[0] == "torch"
    return isinstance(source, (Item, DictOf)) and is_followed(source.base)


def is_large_set(source: Source) -> bool:
    """Check whether the value is a global set of many entries, each of which ``torch.compile`` would guard."""
    if isinstance(root(source), (Self, Query)):
        return False
    try:
        value = value_at(source)
    except (LookupError, AttributeError, TypeError) as error:
        raise_if_own(error)
        return False
    return isinstance(value, (set, frozenset)) and len(value) > _MANY


def cell_of(source: Source) -> types.CellType | None:
    """Return the cell if the value is in the closure of a function, else None."""
    item = source.base if isinstance(source, Attr) and source.name == "cell_contents" else None
    if not (isinstance(item, Item) and isinstance(item.base, Attr) and item.base.name == "__closure__"):
        return None
    function = getattr(item.base.base, "value", None)
    return function.__closure__[item.key] if isinstance(function, types.FunctionType) and function.__closure__ else None


def attribute_owner(source: Source) -> type | types.ModuleType | None:
    """Return the class or the user's Python module if the value is an attribute that it has itself, else None."""
    table = source.base if isinstance(source, Item) else None
    if not (isinstance(table, DictOf) or (isinstance(table, Attr) and table.name == "__dict__")):
        return None
    owner, name = getattr(table.base, "value", None), source.key  # type: ignore[union-attr]
    if isinstance(owner, type):
        return owner if is_attribute(owner, name, vars(owner).get(name)) else None
    if isinstance(owner, types.ModuleType) and owner.__name__.partition(".")[0] not in _NOT_USERS:
        return owner
    return None


def is_attribute(cls: type, name: str, raw: Any) -> bool:
    """Check whether ``raw`` is plain data, a list, a dict or a static method, and ``cls.name`` gives it."""
    is_static = type(raw) is staticmethod and isinstance(raw.__func__, types.FunctionType)
    if not (is_static or is_plain(raw) or type(raw) in (list, dict)):
        return False
    return getattr(cls, name, cls) is (raw.__func__ if is_static else raw)


def global_name(source: Source) -> str:
    """Return the name if the value is a global of a file, else ""."""
    if not (isinstance(source, Item) and isinstance(source.base, Const) and isinstance(source.key, str)):
        return ""
    names = source.base.value
    names = names if isinstance(names, dict) and "__builtins__" in names else {}
    file = sys.modules.get(str(names.get("__name__")))
    return source.key if getattr(file, "__dict__", None) is names and source.key.isidentifier() else ""


@lru_cache(maxsize=1024)
def _reading(name: str) -> types.CodeType:
    made: dict[str, Any] = {}
    exec(compile(f"def read(): return {name}", "<schedule guards>", "exec"), made)
    code: types.CodeType = made["read"].__code__
    return code


def reader(names: dict[str, Any], name: str) -> Callable[[], Any]:
    """Return a function to read a global as code of its file does, so that ``torch.compile`` guards on it alike."""
    return types.FunctionType(_reading(name), names)


def cell_reader(cell: types.CellType) -> Callable[[], Any]:
    """Return a function to read the contents of a cell as code of the closure does."""
    return types.FunctionType(_OF_CELL, globals(), closure=(cell,))


def _reading_a_cell() -> types.CodeType:
    contents = None

    def read() -> Any:
        return contents

    return read.__code__


_OF_CELL = _reading_a_cell()
