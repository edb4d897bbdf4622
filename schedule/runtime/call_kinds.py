"""Kinds of calls of a scheduled module, apart from ordinary runs: watched, traced, transformed, without data."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fused.torch_internals.modes import (
    are_operations_overridden,
    count_dispatch_modes,
    function_mode_stack,
    innermost_transform,
    overrides_operations,
)
from fused.torch_internals.tensor_kinds import FakeTensor, FunctionalTensor
from schedule.capture import leaves, tensors


class _Busy(threading.local):
    now = False


_busy = _Busy()


@contextmanager
def adapting() -> Iterator[None]:
    """Mark the calls of this thread in the block as made for adapting."""
    _busy.now = True
    try:
        yield
    finally:
        _busy.now = False


def are_functions_overridden() -> bool:
    """Check whether a mode of a user is active that sees, and may change, each torch function or operator called."""
    own = ("torch.utils._device", "schedule.")
    return are_operations_overridden() or not all(
        type(mode).__module__.startswith(own) for mode in function_mode_stack()
    )


def overriding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the name of a user's class of tensors among the arguments that may change torch's operations, or ""."""
    return next((type(leaf).__name__ for leaf in tensors((args, kwargs)) if overrides_operations(type(leaf))), "")


def is_only_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether a call is not a real run: it is compiled, exported, transformed, captured, or without data."""
    if torch.compiler.is_compiling() or _busy.now or torch.jit.is_tracing():
        return True
    if count_dispatch_modes() or innermost_transform() is not None:
        return True
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    return any(map(_is_traced_value, (leaf for _, leaf in leaves((args, kwargs)))))


def _is_traced_value(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_meta or isinstance(leaf, (FakeTensor, FunctionalTensor))
    return isinstance(leaf, fx.Proxy)


def summary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe the arguments of a call in a few words."""

    def short(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            sizes = "[nested]" if value.is_nested else list(value.shape)
            return f"{str(value.dtype).removeprefix('torch.')}{sizes}"
        return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__

    return ", ".join([*map(short, args), *(f"{key}={short(value)}" for key, value in kwargs.items())])
