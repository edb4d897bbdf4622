"""Whether a second call of a module is noticeable, judged by its code.

When a check inside a graph fails, the original forward runs from its start and calls the modules before that point a
second time. This is harmless for layers that only compute. Code that may write to anything other than its local
variables is detected by its bytecode instructions and by the names of the methods it calls.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fused.torch_internals.torch_modules import DropoutBase, NormBase
from schedule.capture import function_in, globals_named, is_hooked, is_random_name, members_named, names_in
from schedule.util.own_code import is_outside

_WRITING = {f"{verb}_{kind}" for verb in ("STORE", "DELETE") for kind in ("ATTR", "SUBSCR", "SLICE", "GLOBAL")}
_FIXED = (tuple, frozenset, types.MappingProxyType)
_CHANGING = {name for kind in (list, dict, set, deque, bytearray) for name in dir(kind) if not name.startswith("_")}
_CHANGING -= {name for kind in _FIXED for name in dir(kind)} | {name for name in dir(bytes)} | {"fromkeys"}
_CHANGING |= {"setattr", "delattr", "print", "open", "write", "exec", "eval", "next", "send", "put"}


def is_repeatable(module: nn.Module, training: bool) -> bool:
    """Check whether a second call of ``module`` is unnoticeable, apart from new random numbers.

    Args:
        module: the module, with all its submodules.
        training: whether batch norms update their statistics.
    """
    return not any(is_hooked(child) or may_write(child) or (training and _counts(child)) for child in module.modules())


def may_draw(module: nn.Module) -> bool:
    """Check whether the forward of ``module`` or of a submodule may draw random numbers."""
    for child in module.modules():
        cls: Any = getattr(type(child), "_schedule_original", type(child))
        names = () if is_outside(cls.__module__) else _names(cls)
        if isinstance(child, DropoutBase) or names is None or any(map(is_random_name, names)):
            return True
    return False


def _counts(module: nn.Module) -> bool:
    return isinstance(module, NormBase) and module.track_running_stats


def may_write(module: nn.Module) -> bool:
    """Check whether the forward of ``module`` itself may write to anything other than local variables."""
    if "forward" in vars(module):
        return True
    cls: Any = getattr(type(module), "_schedule_original", type(module))
    if is_outside(cls.__module__):
        return not cls.__module__.startswith("torch.nn.modules") and not isinstance(module, NormBase)
    names = _names(cls)
    if names is None:
        return True
    own = vars(module)
    return any(name in own and _acts(own[name], names) for name in names)


def _acts(value: Any, names: tuple[str, ...]) -> bool:
    """Check whether an attribute named in a forward may write when it, or one of its methods, is called."""
    if isinstance(value, types.FunctionType):
        return _writes(value)
    if isinstance(value, types.BuiltinMethodType):  # e.g. of a list; torch functions belong to a module or a class
        return not isinstance(value.__self__, (types.ModuleType, type, type(None)))
    if isinstance(value, (nn.Module, torch.Tensor, type)) or is_outside(type(value).__module__):
        return isinstance(value, (types.MethodType, functools.partial))
    methods = (function_in(member) for _, _, member in members_named(type(value), (*names, "__call__")))
    return any(_writes(method) for method in methods if method is not None)


@functools.lru_cache(maxsize=4096)
def _names(cls: type) -> tuple[str, ...] | None:
    """Return all names in the code run by the forward of ``cls``, or None if the code may write."""
    found: dict[str, None] = {}
    pending, done = ["forward"], set[str]()
    while pending:
        name = pending.pop()
        if name in done:
            continue
        done.add(name)
        for _, _, member in members_named(cls, (name,)):
            function = function_in(member)
            if function is None:
                continue
            if _writes(function):
                return None
            names = names_in(function.__code__)
            found |= dict.fromkeys(names)
            pending += names
    return tuple(found)


@functools.lru_cache(maxsize=8192)
def _writes(function: types.FunctionType) -> bool:
    """Check whether ``function``, or a user function named in it, may write to anything other than local variables."""
    seen, pending = set[types.FunctionType](), [function]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if any(map(_is_writing, _codes(current.__code__))):
            return True
        cells = (cell.cell_contents for cell in current.__closure__ or () if _is_set(cell))
        others = (*(value for _, value in globals_named(current)), *cells)
        pending += [other for other in others if isinstance(other, types.FunctionType)]
    return False


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_writing(code: types.CodeType) -> bool:
    for name in code.co_names:
        if name in _CHANGING or (name.endswith("_") and not name.endswith("__")):
            return True
    return any(
        step.opname in _WRITING or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )
