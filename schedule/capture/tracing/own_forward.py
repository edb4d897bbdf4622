"""Whether the forward of a class is the one that it was written with, and which functions it calls.

What a rule knows about ``nn.GELU`` it knows about the forward that torch ships. A library that replaces
``nn.GELU.forward`` leaves the class in place; such modules are read like any other.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch import nn

_LOADS = ("LOAD_ATTR", "LOAD_METHOD")  # LOAD_METHOD: Python 3.11


def has_own_forward(cls: type[nn.Module]) -> bool:
    """Whether calling a ``cls`` runs the forward in the source of ``cls``, or of a class that it inherits from."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    return (
        isinstance(forward, types.FunctionType)
        and forward.__globals__.get("__name__") == owner.__module__
        and forward.__code__.co_qualname == f"{owner.__qualname__}.forward"
        and cls.__call__ is nn.Module.__call__
    )


def functions_called(forward: Any) -> Iterator[tuple[types.ModuleType, str, Callable[..., Any]]]:
    """The functions that ``forward`` takes from Python modules: for ``F.linear``, ``F``, ``"linear"`` and its value."""
    if not isinstance(forward, types.FunctionType):
        return
    for name, attribute in _attributes_of_globals(forward.__code__):
        module = forward.__globals__.get(name)
        if isinstance(module, types.ModuleType) and callable(vars(module).get(attribute)):
            yield module, attribute, vars(module)[attribute]


@lru_cache(maxsize=1024)
def _attributes_of_globals(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """``("F", "linear")`` for each ``F.linear`` in ``code``, where ``F`` is a global."""
    found = pairwise(dis.get_instructions(code))
    return tuple((a.argval, b.argval) for a, b in found if a.opname == "LOAD_GLOBAL" and b.opname in _LOADS)


def is_projection(module: nn.Module) -> bool:
    """Whether ``module`` is a plain Linear, or transformers' Conv1D (a Linear with its weight transposed)."""
    return (type(module) is nn.Linear and has_own_forward(nn.Linear)) or is_conv1d(type(module))


def is_conv1d(cls: type[nn.Module]) -> bool:
    """Whether ``cls`` is transformers' Conv1D: ``x @ weight + bias``, weight of shape [in, out]."""
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils" and has_own_forward(cls)


def is_basic(module: nn.Module) -> bool:
    """Whether ``module`` stays a call when what calls it is flattened."""
    if isinstance(module, nn.Sequential):
        return False
    return type(module).__module__.startswith("torch.nn.") or is_conv1d(type(module))
