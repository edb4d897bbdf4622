"""Checks for replaced forwards of classes, and the functions called by a forward.

Rules about ``nn.GELU`` assume the forward shipped by torch. If a library replaces ``nn.GELU.forward``, the class stays
the same, and such modules are treated like any other module.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise, permutations
from typing import Any

from torch import nn

from fused.assumptions import holds
from fused.torch_internals.torch_modules import MODULE_CALLS
from schedule.capture.guards.resolution import found_in

CALL_NAMES = ("__call__", "_wrapped_call_impl", "_call_impl")
"""Names by which a call of a module reaches its forward."""
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")  # LOAD_METHOD: Python 3.11


def has_own_forward(cls: type[nn.Module]) -> bool:
    """Check whether calling a ``cls`` runs a forward from the source of ``cls`` or one of its bases.

    The same holds for the methods that the forward calls on itself.
    """
    methods = methods_called(cls)
    calls_forward = "forward" in methods and all(found_in(cls, name) in MODULE_CALLS for name in CALL_NAMES)
    return calls_forward and all(_is_own(cls, name, method) for name, method in methods.items())


def _is_own(cls: type[nn.Module], name: str, method: types.FunctionType) -> bool:
    owner = next(base for base in cls.__mro__ if name in vars(base))
    in_module = method.__globals__.get("__name__") == owner.__module__
    return in_module and method.__code__.co_qualname == f"{owner.__qualname__}.{name}"


def is_shipped(function: Any) -> bool:
    """Check whether ``function`` is torch's or Python's own, and not a patch made before this module was loaded."""
    if isinstance(function, types.FunctionType):
        return str(function.__globals__["__name__"]).split(".")[0] == "torch"
    return isinstance(function, types.BuiltinFunctionType)


def methods_called(cls: type[nn.Module]) -> dict[str, types.FunctionType]:
    """Return the forward of ``cls`` and the methods it calls on itself, such as ``_conv_forward``, by name."""
    methods: dict[str, types.FunctionType] = {}
    names = ["forward"]
    while names:
        name = names.pop()
        method = found_in(cls, name)
        if isinstance(method, types.FunctionType) and name not in methods:
            methods[name] = method
            names += _attributes_of_self(method.__code__)
    return methods


def functions_called(cls: type[nn.Module]) -> Iterator[tuple[types.ModuleType, str, Callable[..., Any]]]:
    """Yield the functions used by a forward from Python modules: for ``F.linear``, ``(F, "linear", F.linear)``."""
    for method in methods_called(cls).values():
        for name, attribute in _attributes_of_globals(method.__code__):
            module = method.__globals__.get(name)
            if isinstance(module, types.ModuleType) and callable(vars(module).get(attribute)):
                yield module, attribute, vars(module)[attribute]


@lru_cache(maxsize=1024)
def _attributes_of_self(code: types.CodeType) -> tuple[str, ...]:
    """Return ``"weight"`` for each ``self.weight`` in ``code``."""
    if not holds("bytecode of methods"):
        return code.co_names
    owner = code.co_varnames[:1]
    found = pairwise(dis.get_instructions(code))
    return tuple(b.argval for a, b in found if b.opname in _LOADS and _last_loaded(a) == owner)


def _last_loaded(instruction: dis.Instruction) -> tuple[str, ...]:
    """Return the name of the local variable loaded last: Python 3.13 has instructions that load two."""
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return names[-1:] if instruction.opname.startswith("LOAD_FAST") else ()


@lru_cache(maxsize=1024)
def _attributes_of_globals(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """Return ``("F", "linear")`` for each ``F.linear`` in ``code`` with a global ``F``."""
    if not holds("bytecode of methods"):
        return tuple(permutations(code.co_names, 2))
    found = pairwise(dis.get_instructions(code))
    return tuple((a.argval, b.argval) for a, b in found if a.opname == "LOAD_GLOBAL" and b.opname in _LOADS)


def is_projection(module: nn.Module) -> bool:
    """Check whether ``module`` is a plain Linear or transformers' Conv1D (a Linear with its weight transposed)."""
    return (type(module) is nn.Linear and has_own_forward(nn.Linear)) or is_conv1d(type(module))


def is_batch_norm(cls: type[nn.Module]) -> bool:
    """Check whether ``cls`` is a plain batch norm: no subclass, such as a synchronized one."""
    known = cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) and has_own_forward(cls)
    return known and all(is_shipped(function) for _, _, function in functions_called(cls))


def installed_forward(module: nn.Module) -> Any:
    """Return the forward given to ``module`` by a primitive in place of its class's, or None."""
    return getattr(vars(module).get("_schedule_state"), "forward", None)


def is_conv1d(cls: type[nn.Module]) -> bool:
    """Check whether ``cls`` is transformers' Conv1D: ``x @ weight + bias``, weight of shape [in, out]."""
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils" and has_own_forward(cls)


def is_basic(module: nn.Module) -> bool:
    """Check whether ``module`` stays a call when its caller is flattened."""
    if isinstance(module, nn.Sequential):
        return False
    return type(module).__module__.startswith("torch.nn.") or is_conv1d(type(module))
