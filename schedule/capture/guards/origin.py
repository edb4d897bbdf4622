"""Origin of functions and classes: the user's code or library code.

User code is followed. Most code of torch, Python and this package runs as it is.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

from schedule.util.own_code import PACKAGES

_TORCH = str(Path(torch.__file__).parent)
_FOLLOWED = (f"{_TORCH}/nn/modules/", f"{_TORCH}/nn/utils/param")
_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
_CONTAINERS = (list, tuple, dict, set, frozenset, types.MappingProxyType)
_SETTINGS = {"types.SimpleNamespace", "argparse.Namespace"}  # standard-library classes used for settings
_SETTINGS |= {"collections.UserDict", "collections.UserList", "collections.ChainMap", "os._Environ"}
PURE = {"builtins", "types", "typing", "abc", "_abc", "enum", "dataclasses", "inspect", "contextlib", "copy"}
PURE |= {"math", "cmath", "operator", "_operator", "itertools", "functools", "_functools", "collections"}
PURE |= {"_collections", "re", "_sre", "string", "textwrap", "fnmatch", "unicodedata", "difflib", "json", "base64"}
PURE |= {"binascii", "ast", "numbers", "fractions", "bisect", "_bisect", "heapq", "_heapq", "array"}
PURE |= {"struct", "_struct", "zlib", "hashlib", "_hashlib", "_sha256", "_md5", "keyword", "statistics"}
PURE |= {"_statistics", "_weakref", "schedule", "fused"}


def is_pure(root: str, args: tuple[Any, ...], owner: Any = None) -> bool:
    """Check whether a function computes its result from its arguments alone; others ask the process.

    Args:
        root: package of the function. Functions of numpy without a value to compute from read settings or files.
        args: its positional arguments.
        owner: the object it is a method of.
    """
    if any(map(is_changeable, (*args, owner))):
        return False
    if root == "numpy":
        return not all(isinstance(each, (str, bytes, os.PathLike)) for each in args)
    return root in PURE


IMMUTABLE = {"pathlib", "datetime", "re", "decimal", "fractions", "uuid", "ipaddress", "zoneinfo", "typing", "types"}
IMMUTABLE |= {"inspect", "enum", "operator", "numbers", "torch"}
_UNCHANGED = {object, range, slice, property, staticmethod, classmethod, type(None), type(...), type(NotImplemented)}
_UNCHANGED |= {bool, int, float, complex, str, bytes, types.MethodType, types.MethodWrapperType}
_UNCHANGED |= {types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType}
_UNCHANGED |= {types.GetSetDescriptorType, types.MemberDescriptorType}
"""Built-in classes of objects that do not change; others, such as views of dicts, do."""


def is_changeable(value: Any) -> bool:
    """Check whether ``value`` is guarded by identity although its content may change, such as a queue."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)):
        return False
    cls = type(value)
    if cls.__module__ == "builtins":
        return is_fixed(value) and not (cls in _UNCHANGED or issubclass(cls, BaseException))
    known = cls.__module__.partition(".")[0] in IMMUTABLE and cls is not torch.Generator
    return is_fixed(value) and not known


def bound_to(function: Any) -> Any:
    """Return the object that a method written in C is bound to, or None."""
    if not isinstance(function, (types.BuiltinMethodType, types.MethodWrapperType)):
        return None
    return None if isinstance(function.__self__, (type, types.ModuleType)) else function.__self__


def module_of(function: Any) -> str:
    """Return the name of the module that defines ``function``, also of a method of a class written in C."""
    if module := getattr(function, "__module__", None):
        return str(module)
    cls, name = type(getattr(function, "__self__", None)), getattr(function, "__name__", "")
    holder = next((base for base in cls.__mro__ if name in vars(base)), cls)
    return str(getattr(function, "__objclass__", holder).__module__)


def is_native(function: types.FunctionType) -> bool:
    """Check whether ``function`` is torch's, Python's or this package's, and does not wrap a user's function."""
    if not _is_native_file(function.__code__.co_filename):
        return False
    cells = (cell for cell in function.__closure__ or () if cell_is_set(cell))
    functions = [getattr(each.cell_contents, "__func__", each.cell_contents) for each in cells]
    return all(is_native(each) for each in functions if isinstance(each, types.FunctionType) and each is not function)


def cell_is_set(cell: types.CellType) -> bool:
    """Check whether a variable of an enclosing function has a value yet."""
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
    """Check whether ``cls`` belongs to torch, Python or numpy."""
    file = cls.__module__
    if file.startswith("torch.nn.modules"):
        return True
    root = file.partition(".")[0]
    return root in ("torch", "numpy", "builtins") or root in sys.stdlib_module_names


def is_fixed(value: Any) -> bool:
    """Check whether ``value`` is guarded by identity: classes, functions, modules of Python, locks and the like."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)):
        return True
    cls = type(value)
    if isinstance(value, (torch.nn.Module, torch.Tensor, *_CONTAINERS)) or cls.__module__ == "numpy":
        return False
    if f"{cls.__module__}.{cls.__qualname__}" in _SETTINGS or cls.__module__ in ("collections", "functools"):
        return cls.__name__ == "_lru_cache_wrapper"
    return is_native_class(cls)
