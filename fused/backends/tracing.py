"""Is somebody watching: tracers and transforms that need plain torch operations to look at."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fused.torch_internals.modes import (
    are_functorch_transforms_active,
    count_dispatch_modes,
    is_batched_by_autograd,
    is_forward_ad_active,
)

PLAIN = (torch.Tensor, torch.nn.Parameter)

_thread = threading.local()


@contextmanager
def for_the_compiler() -> Iterator[None]:
    """Within, in this thread, formulas are traced to be compiled."""
    _thread.compiling = True
    try:
        yield
    finally:
        _thread.compiling = False


def is_compiled() -> bool:
    """True where a formula is traced to be compiled, by `torch.compile` or by us: some are written otherwise then."""
    return torch.compiler.is_compiling() or getattr(_thread, "compiling", False)


def transformed() -> bool:
    """True while a tracer, a `torch.func` transform or forward-mode differentiation is at work.

    The ops are then written out as differentiable torch operations: whoever is watching sees through them.
    """
    return (
        torch.compiler.is_compiling()
        or are_functorch_transforms_active()
        or is_forward_ad_active()
        or torch.jit.is_tracing()
    )


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """True if autograd will want the gradient of one of the tensors: else its bookkeeping can be spared."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def watched(tensors: Iterable[torch.Tensor]) -> bool:
    """True where plain torch operations are to be seen, or the tensors do more than compute their own values.

    Tracing and transforms; dispatch modes; tensor subclasses; batched gradients (``is_grads_batched``).
    """
    if transformed() or count_dispatch_modes() > 0:
        return True
    return any(type(t) not in PLAIN or is_batched_by_autograd(t) for t in tensors)


def needs_reference(tensors: Iterable[Any]) -> bool:
    """True if only plain torch operations are right for these tensors here.

    Tracing and transforms; dispatch modes (fake tensors, `make_fx`, operation counters); tensor subclasses;
    the meta device; a backward pass that is itself recorded for another one.
    """
    if transformed() or count_dispatch_modes() > 0:
        return True
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (
            type(tensor) not in PLAIN or tensor.is_meta or (recording and tensor.requires_grad)
        ):
            return True
    return False
