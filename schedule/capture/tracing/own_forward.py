"""Checks for replaced forwards of classes, and the functions called by a forward.

Rules about ``nn.GELU`` assume the forward shipped by torch. If a library replaces ``nn.GELU.forward``, the class stays
the same, and such modules are treated like any other module.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from torch import nn

from fused.torch_internals.modules import MODULE_CALLS
from schedule.capture.tracing.reading.resolution import found_in

CALL_NAMES = ("__call__", "_wrapped_call_impl", "_call_impl")
"""Names by which a call of a module reaches its forward."""
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")  # LOAD_METHOD: Python 3.11


def has_own_forward(cls: type[nn.Module]) -> bool:
    """Check whether calling a ``cls`` runs a forward from the source of ``cls`` or one of its bases."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    return (
        isinstance(forward, types.FunctionType)
        and forward.__globals__.get("__name__") == owner.__module__
        and forward.__code__.co_qualname == f"{owner.__qualname__}.forward"
        and all(found_in(cls, name) in MODULE_CALLS for name in CALL_NAMES)
    )


def functions_called(forward: Any) -> Iterator[tuple[types.ModuleType, str, Callable[..., Any]]]:
    """Yield the functions used by ``forward`` from Python modules: for ``F.linear``, ``(F, "linear", F.linear)``."""
    if not isinstance(forward, types.FunctionType):
        return
    for name, attribute in _attributes_of_globals(forward.__code__):
        module = forward.__globals__.get(name)
        if isinstance(module, types.ModuleType) and callable(vars(module).get(attribute)):
            yield module, attribute, vars(module)[attribute]


@lru_cache(maxsize=1024)
def _attributes_of_globals(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """Return ``("F", "linear")`` for each ``F.linear`` in ``code`` with a global ``F``."""
    found = pairwise(dis.get_instructions(code))
    return tuple((a.argval, b.argval) for a, b in found if a.opname == "LOAD_GLOBAL" and b.opname in _LOADS)


def is_projection(module: nn.Module) -> bool:
    """Check whether ``module`` is a plain Linear or transformers' Conv1D (a Linear with its weight transposed)."""
    return (type(module) is nn.Linear and has_own_forward(nn.Linear)) or is_conv1d(type(module))


def is_conv1d(cls: type[nn.Module]) -> bool:
    """Check whether ``cls`` is transformers' Conv1D: ``x @ weight + bias``, weight of shape [in, out]."""
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils" and has_own_forward(cls)


def is_basic(module: nn.Module) -> bool:
    """Check whether ``module`` stays a call when its caller is flattened."""
    if isinstance(module, nn.Sequential):
        return False
    return type(module).__module__.startswith("torch.nn.") or is_conv1d(type(module))
