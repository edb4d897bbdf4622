"""Sources that ``torch.compile`` can follow and guard on by itself."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from schedule.capture.tracing.reading.sources import Const, DictOf, Item, Query, Self, Source, root

_COMPARED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.dtype)
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


def is_stored(source: Source) -> bool:
    """Check whether the value is read from the module or a global through dictionaries and items alone."""
    while isinstance(source, (Item, DictOf)) and not global_name(source):
        source = source.base
    return isinstance(source, Self) or bool(global_name(source))


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
    exec(compile(f"def read(): return {name}", "<schedule ledger>", "exec"), made)
    code: types.CodeType = made["read"].__code__
    return code


def reader(names: dict[str, Any], name: str) -> Callable[[], Any]:
    """Return a function to read a global as code of its file does, so that ``torch.compile`` guards on it alike."""
    return types.FunctionType(_reading(name), names)
