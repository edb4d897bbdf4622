"""Checks for tracers, transforms and modes in need of plain torch operations."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fused.torch_internals.modes import (
    are_functorch_transforms_active,
    are_operations_observed,
    are_operations_overridden,
    count_dispatch_modes,
    is_batched_by_autograd,
    is_exporting,
    is_forward_ad_active,
    is_jit_tracing,
    overrides_operations,
)

PLAIN = (torch.Tensor, torch.nn.Parameter)

_thread = threading.local()


@contextmanager
def for_the_compiler() -> Iterator[None]:
    """Mark formulas as being traced for compilation, in this thread."""
    _thread.compiling = True
    try:
        yield
    finally:
        _thread.compiling = False


def is_compiled() -> bool:
    """Check whether a formula is being traced for compilation, by `torch.compile` or by this package.

    Some formulas are written differently then.
    """
    return torch.compiler.is_compiling() or getattr(_thread, "compiling", False)


def computed_first(x: torch.Tensor) -> torch.Tensor:
    """Return x as compiled code computes it: before the loops that read it, not anew at each of their steps."""
    return x.as_strided(x.shape, x.stride()) if is_compiled() else x


def row_by_row(of_rows: torch.Tensor) -> torch.Tensor:
    """Return a boolean of each row; compiled code for the CPU computes with it for one row at a time, not for several.

    It can then be in one loop with the sums of the row, so that these read a row while it is in the cache. The
    compiler has no vectors of int16.
    """
    return of_rows.to(torch.int16).bool() if is_compiled() and of_rows.is_cpu else of_rows


def is_compiled_alone() -> bool:
    """Check whether `torch.compile` traces a call outside of an export and of `torch.func` transforms.

    An operator with its own gradient is enough there; its gradient need not be traced itself.
    """
    return torch.compiler.is_compiling() and not is_exporting() and not are_functorch_transforms_active()


def transformed(*operands: Any) -> bool:
    """Check whether a tracer, a `torch.func` transform or forward-mode differentiation is active, or an override.

    The ops then run as differentiable torch operations, visible to the tracer or transform. So they do for operands of
    a user's class of tensors, or under a user's dispatch mode, that may change what operations compute.
    """
    if torch.compiler.is_compiling() or are_functorch_transforms_active() or is_forward_ad_active() or is_jit_tracing():
        return True
    if count_dispatch_modes() and are_operations_overridden():
        return True
    return any(
        [type(t) not in PLAIN and isinstance(t, torch.Tensor) and overrides_operations(type(t)) for t in operands]
    )


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Check whether autograd needs the gradient of one of the tensors, else its bookkeeping can be skipped."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def watched(tensors: Iterable[torch.Tensor]) -> bool:
    """Check whether plain torch operations must run because of a tracer, a mode, or the type or layout of a tensor.

    Tracing and transforms; dispatch modes, except those of selective checkpointing; tensor subclasses; tensors without
    strides, such as sparse ones; batched gradients (``is_grads_batched``).
    """
    if transformed() or are_operations_observed():
        return True
    return any(type(t) not in PLAIN or t.layout is not torch.strided or is_batched_by_autograd(t) for t in tensors)


def needs_reference(tensors: Iterable[Any]) -> bool:
    """Check whether only plain torch operations are correct for these tensors.

    Tracing and transforms; dispatch modes (fake tensors, `make_fx`, operation counters), except those of selective
    checkpointing; tensor subclasses; tensors without strides, such as sparse ones; the meta device; a backward pass
    recorded for double backward.
    """
    if transformed() or are_operations_observed():
        return True
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) in PLAIN:
            if tensor.is_meta or tensor.layout is not torch.strided or (recording and tensor.requires_grad):
                return True
        elif isinstance(tensor, torch.Tensor):
            return True
    return False
