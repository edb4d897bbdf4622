"""Whose code a function or class is: the user's, which is followed, or that of torch and Python itself."""

from __future__ import annotations

import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

from schedule.util.own_code import PACKAGES

_TORCH = str(Path(torch.__file__).resolve().parent)
_FOLLOWED = (f"{_TORCH}/nn/modules/", f"{_TORCH}/nn/utils/param")
_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
_CONTAINERS = (list, tuple, dict, set, frozenset, types.MappingProxyType)
_SETTINGS = {"types.SimpleNamespace", "argparse.Namespace"}  # classes of Python's own whose objects hold settings
_SETTINGS |= {"collections.UserDict", "collections.UserList", "collections.ChainMap", "os._Environ"}


def is_native(function: types.FunctionType) -> bool:
    """Whether ``function`` runs as it is: torch's, Python's or this package's, unless it wraps a user's function."""
    if not _is_native_file(function.__code__.co_filename):
        return False
    cells = (cell for cell in function.__closure__ or () if cell_is_set(cell))
    held = [getattr(each.cell_contents, "__func__", each.cell_contents) for each in cells]
    return all(is_native(each) for each in held if isinstance(each, types.FunctionType) and each is not function)


def cell_is_set(cell: types.CellType) -> bool:
    """Whether a variable of an enclosing function has a value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_native_file(name: str) -> bool:
    if name.startswith(_FOLLOWED):
        return False
    if name.startswith((_TORCH, *PACKAGES)) or name.startswith("<frozen"):
        return True
    if name.startswith(_SITE):
        return name.startswith(tuple(f"{site}/numpy/" for site in _SITE))
    return name.startswith(_STDLIB) and not name.endswith("contextlib.py")


def is_native_class(cls: type) -> bool:
    """Whether ``cls`` is torch's, Python's or numpy's own."""
    file = cls.__module__
    if file.startswith("torch.nn.modules"):
        return True
    root = file.partition(".")[0]
    return root in ("torch", "numpy", "builtins") or root in sys.stdlib_module_names


def is_fixed(value: Any) -> bool:
    """Whether ``value`` is known by its identity: code, files, and objects such as locks of torch's or Python's own."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)):
        return True
    cls = type(value)
    if isinstance(value, (torch.nn.Module, torch.Tensor, *_CONTAINERS)) or cls.__module__ == "numpy":
        return False
    if f"{cls.__module__}.{cls.__qualname__}" in _SETTINGS or cls.__module__ in ("collections", "functools"):
        return cls.__name__ == "_lru_cache_wrapper"
    return is_native_class(cls)
