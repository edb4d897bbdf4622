"""Native functions known to have no effect: they compute a value, or answer a query. All others are refused.

A graph would not repeat what the others do, and a guard that calls them would do it once more. Functions of torch are
judged by torch's naming conventions, other functions by the module that defines them.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fused.torch_internals.schemas import OpOverload, OpOverloadPacket
from schedule.capture.guards.origin import IMMUTABLE, PURE, is_changeable, is_native_class, is_pure
from schedule.capture.guards.plain_values import is_atom
from schedule.capture.recording.structure import leaves

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPERATORS = {"torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special", "torch._C._sparse"}
_OPERATORS |= {"torch._C._nested"}
_TORCH_PURE: tuple[str, ...] = ("torch._C._functions", "torch._dynamo", "torch._functorch", "torch._jit_internal")
_TORCH_PURE += ("torch._ops", "torch._utils", "torch.compiler", "torch.distributions", "torch.func")
_TORCH_PURE += (
    "torch.functional",
    "torch.fx",
    "torch.jit",
    "torch.masked",
    "torch.nn",
    "torch.overrides",
    "torch.utils._contextlib",
)
_TORCH_PURE += ("torch.utils._pytree", "torch.utils.checkpoint")
"""Packages of torch whose functions have no effect on the process."""

_QUERIES = ("is", "get", "has", "are_", "can_", "current_", "active_", "main_")
_STATES = ("enabled", "available", "count", "built", "initialized", "supported", "initial_seed", "typename")
_ANSWERING = {"genericpath", "posixpath", "ntpath", "platform", "stat", "sysconfig"}
"""Modules whose functions all answer queries."""
_OS = ("access", "cpu_count", "listdir", "lstat", "stat", "uname", "encode", "decode", "fsencode", "fsdecode", "fspath")
"""``encode`` and ``decode`` are those of ``os.environ``."""
_FUNCTIONS: dict[str, Collection[str]] = {
    **dict.fromkeys(("os", "posix", "nt"), _OS),
    "numpy": ("fromfile", "genfromtxt", "load", "loadtxt"),
    "sys": ("exc_info",),
    "importlib": ("find_spec", "metadata", "version"),
    "shutil": ("which",),
}
_PATH = {"absolute", "cwd", "exists", "home", "lstat", "owner", "read_bytes", "read_text", "resolve", "samefile"}
_PATH |= {"stat"}
_LOCK = ("is_alive", "is_set", "locked")
_QUEUE = ("empty", "full", "qsize")
_METHODS: dict[str, Collection[str]] = {
    **dict.fromkeys(("threading", "_thread"), _LOCK),
    **dict.fromkeys(("queue", "_queue"), _QUEUE),
    "array": ("buffer_info", "count", "index", "tobytes", "tolist", "tounicode"),
    "builtins": ("count", "decode", "endswith", "find", "hex", "index", "split", "startswith", "tobytes", "tolist"),
    "configparser": ("get", "getboolean", "getfloat", "getint", "has_option", "has_section", "options", "sections"),
    "_io": ("getvalue", "isatty", "readable", "seekable", "tell", "writable"),
    "logging": ("getEffectiveLevel", "hasHandlers", "isEnabledFor"),
    "torch": ("get_state", "initial_seed"),
    "weakref": ("__call__",),
}
"""Methods of objects with changeable content that only read it."""
_OF_CLASSES = ("__dir__", "__subclasses__", "mro")

KNOWN_MANAGERS: tuple[type, ...] = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
KNOWN_MANAGERS += (torch.inference_mode, torch.autocast, record_function)
"""Context managers of torch that the trace writes, or that change nothing."""
_MADE = PURE | IMMUTABLE | {"_queue", "_thread", "array", "configparser", "contextvars", "ctypes", "_ctypes"}
_MADE |= {"io", "logging", "numpy", "queue", "threading", "weakref"}


def name_of(function: Any) -> str:
    """Return the name of a function; the name of a callable object is that of the method called."""
    return str(getattr(function, "__name__", "__call__"))


def described_call(function: Any, module: str) -> str:
    """Return the full name of a function, with its class if it is a method."""
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def is_traced(function: Any, module: str, given: Collection[Any]) -> bool:
    """Check whether a function of torch is an operator or is passed tensors or sizes, so that the trace sees it."""
    if module.partition(".")[0] != "torch":
        return False
    if getattr(function, "__qualname__", "").startswith("_VariableFunctions") or module in _OPERATORS:
        return True
    values = (leaf for each in given for _, leaf in leaves(each))
    return any(isinstance(each, (torch.Tensor, *SYMBOLIC, OpOverload, OpOverloadPacket)) for each in values)


def computes(function: Any, module: str, args: tuple[Any, ...], owner: Any) -> bool:
    """Check whether a function computes its result from its arguments alone, and does nothing else.

    Args:
        function: a native function or class.
        module: the module that defines it.
        args: its positional arguments.
        owner: the object it is a method of, or None.
    """
    if isinstance(function, type):
        return _only_makes(function)
    if _is_in(module, _TORCH_PURE) or isinstance(args[0] if owner is None and args else owner, KNOWN_MANAGERS):
        return True
    if module.startswith("pathlib"):
        return getattr(function, "__qualname__", "").startswith("PurePath")
    root, name = module.partition(".")[0], name_of(function)
    if asks_class(name, owner):
        return False
    if root == "numpy" and (name.startswith("save") or (name.startswith("set") and all(map(is_atom, args)))):
        return False
    return is_pure(root, args, owner) or (root == "datetime" and not isinstance(owner, (type, types.ModuleType)))


def asks_class(name: str, owner: Any) -> bool:
    """Check whether a method asks about a class, such as ``__subclasses__``: its answer may change."""
    return isinstance(owner, type) and name in _OF_CLASSES


def is_query(function: Any, module: str, given: tuple[Any, ...]) -> bool:
    """Check whether a function answers a query to the process or to an object, and does nothing else.

    Args:
        function: a native function.
        module: the module that defines it.
        given: the object it is a method of, if any, and its arguments.
    """
    name, root = name_of(function), module.partition(".")[0]
    if changeable := [each for each in given if is_changeable(each)]:
        roots = {type(each).__module__.partition(".")[0] for each in changeable}
        return all(name in _METHODS.get(each, ()) for each in roots)
    plain = name.lstrip("_")
    if only_checks(function, module) or asks_class(name, getattr(function, "__self__", None)):
        return True
    if root == "torch":
        return plain.startswith(_QUERIES) or (plain.endswith(_STATES) and not plain.startswith(("set", "enable")))
    if root == "pathlib":
        return plain.startswith("is_") or name in _PATH
    return root in _ANSWERING or name in _FUNCTIONS.get(root, ()) or (_is_library(root) and plain.startswith(_QUERIES))


def only_checks(function: Any, module: str) -> bool:
    """Check whether a function of torch does nothing but to raise an error, or to inform a compiler."""
    checks = module.partition(".")[0] == "torch" and name_of(function).startswith(("_check", "_assert"))
    return checks or _is_in(module, ("torch._dynamo", "torch.compiler"))


def _only_makes(cls: type) -> bool:
    """Check whether constructing ``cls`` changes nothing but the new object."""
    if cls.__module__.partition(".")[0] == "torch":
        made = issubclass(cls, (*KNOWN_MANAGERS, torch.device, torch.Stream)) or _is_in(cls.__module__, _TORCH_PURE)
        return made or not issubclass(cls, AbstractContextManager)
    if not is_native_class(cls) or issubclass(cls, BaseException):
        return True
    return cls.__module__.partition(".")[0] in _MADE or cls.__name__ in ("StringIO", "BytesIO")


def _is_library(root: str) -> bool:
    return root in _FUNCTIONS or root in ("threading", "_thread", "logging", "locale", "gc", "asyncio", "socket")


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in packages)
