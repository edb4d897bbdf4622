"""Active modes and transforms of this thread. The names are torch's own functions: no call is added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.overrides import _pop_mode_temporarily as popped_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack

from fused.assumptions import holds, private

__all__ = [
    "NO_TORCH_FUNCTION",
    "DisableTorchFunction",
    "EnableTorchFunction",
    "PassiveDispatchMode",
    "TorchDispatchMode",
    "are_functorch_transforms_active",
    "are_operations_observed",
    "are_operations_overridden",
    "are_saved_tensor_hooks_enabled",
    "count_dispatch_modes",
    "count_function_modes",
    "function_mode_stack",
    "innermost_transform",
    "is_any_autocast_enabled",
    "is_autocasting",
    "is_batched_by_autograd",
    "is_exporting",
    "is_forward_ad_active",
    "is_jit_tracing",
    "is_torch_function_disabled",
    "is_tracing_dispatch_active",
    "keeps_operations",
    "overrides_operations",
    "popped_function_mode",
    "set_grad_enabled",
    "without_dispatch_modes",
    "without_function_modes",
]

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of classes that torch functions take for plain tensors."""
DisableTorchFunction: Any = torch._C.DisableTorchFunction
EnableTorchFunction: Any = torch._C._EnableTorchFunction
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_torch_function_disabled: Callable[[], bool] = torch._C._is_torch_function_all_disabled
are_functorch_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
are_saved_tensor_hooks_enabled: Callable[[], bool] = private(
    "saved-tensor hooks", "torch._C._autograd._saved_tensors_hooks_is_enabled", lambda: False
)
is_any_autocast_enabled: Callable[[], bool] = private(
    "autocast of any device", "torch._C._is_any_autocast_enabled", lambda: True
)
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
is_batched_by_autograd: Callable[[torch.Tensor], bool] = private(
    "batched gradients", "torch._C._functorch.is_legacy_batchedtensor", lambda tensor: False
)

_TRACING_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Call torch's functions as they are called outside of all modes."""
    with ExitStack() as stack:
        for _ in range(count_function_modes()):
            stack.enter_context(popped_function_mode())
        yield


def is_autocasting(tensor: torch.Tensor) -> bool:
    """Check whether autocast is enabled for the device of a tensor; tensors without data have none."""
    # torch.amp.is_autocast_available, the other way to ask, breaks graphs of torch.compile in torch 2.11.
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def is_exporting() -> bool:
    """Check whether `torch.export` traces; in compiled code of torch 2.11 its own function is always true."""
    return torch.compiler._is_exporting_flag


def is_tracing_dispatch_active() -> bool:
    """Check whether a fake, proxy or functional mode of torch is active."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING_MODES)


class PassiveDispatchMode(TorchDispatchMode):
    """Dispatch mode that need not see what a kernel computes: it looks for writes to known memory."""


_SELECTIVE_CHECKPOINTING: tuple[type, ...] = tuple(
    mode
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if (mode := private("selective checkpoints", f"torch.utils.checkpoint.{name}")) is not None
)
_UNOBSERVING = (*_SELECTIVE_CHECKPOINTING, PassiveDispatchMode)
_HAS_LEVELS = holds("forward-mode derivatives")


def are_operations_observed() -> bool:
    """Check whether a dispatch mode is active that must see torch operations.

    Those of selective checkpointing need not: what a kernel computes is computed again in the backward pass.
    """
    if not count_dispatch_modes():
        return False
    return not all(isinstance(mode, _UNOBSERVING) for mode in dispatch_mode_stack())


def are_operations_overridden() -> bool:
    """Check whether a dispatch mode is active that may change what operations compute: one that a user wrote.

    A class of modes that leaves results as they are says so with ``observes_only = True``.
    """
    return any(not _observes_only(type(mode)) for mode in dispatch_mode_stack())


def _observes_only(mode: type) -> bool:
    own = ("torch.", "schedule.", "fused.")
    return getattr(mode, "observes_only", False) or mode.__module__.startswith(own)


def overrides_operations(cls: type[torch.Tensor]) -> bool:
    """Check whether a user's class of tensors may change what torch's functions or operators compute."""
    if cls.__module__.startswith("torch."):
        return False
    is_plain = cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not is_plain or _function_of(cls) not in (NO_TORCH_FUNCTION, _function_of(torch.Tensor))


def _function_of(cls: type[torch.Tensor]) -> Any:
    function: Any = cls.__torch_function__  # a new bound method at each look
    return getattr(function, "__func__", function)


def keeps_operations(value: Any) -> bool:
    """Check whether ``value`` is a tensor, of a class that leaves torch's functions and operators as they are."""
    return isinstance(value, torch.Tensor) and not overrides_operations(type(value))


def is_forward_ad_active() -> bool:
    """Check whether a level of forward-mode differentiation is open."""
    return _HAS_LEVELS and forward_ad._current_level >= 0
