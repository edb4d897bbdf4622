"""Environment of a call besides its arguments: the device type and the autocast state."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fused.torch_internals.modes import is_any_autocast_enabled
from schedule.capture.recording.recording import Call
from schedule.capture.recording.specs import TensorSpec
from schedule.capture.recording.structure import leaves
from schedule.capture.tracing.signature import Signature

FAST_PATH = "not torch.is_grad_enabled() and not _own['training'] and torch.backends.mha.get_fastpath_enabled()"

_QUICKLY_ASKED = ("cpu", "cuda")
"""Device types among those that one quick question covers: is autocast enabled for any of them?"""


def quiet_autocast(device_type: str, dtype: torch.dtype | None) -> torch.autocast:
    """Return an autocast block without caching, so casts of parameters made inside do not stay in autocast's cache."""
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def parameter_conditions(module: nn.Module, signature: Signature) -> list[str]:
    """Return a condition on the dtype of the first floating-point parameter, if no tensor argument is floating point.

    For example, a module called with token ids: its arguments do not determine the dtype it computes in.
    """
    if any(spec.dtype.is_floating_point for spec in signature.tensors.values()):
        return []
    floating = ((path, p) for path, p in module.named_parameters() if p.is_floating_point())
    for path, parameter in floating:
        *holders, name = path.split(".")
        holder = "self" + "".join(f"._modules[{part!r}]" for part in holders)
        return [f"{holder}._parameters[{name!r}].dtype is {parameter.dtype}"]
    return []


def _has_fast_path(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Check whether torch may run ``module`` as one fused kernel. Under a tracer it does not."""
    if not isinstance(module, nn.TransformerEncoderLayer) or forward is not nn.TransformerEncoderLayer.forward:
        return False
    return bool(module.activation_relu_or_gelu)


def on_fast_path(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Check whether a call of ``module`` now may take torch's fused kernel, see :data:`FAST_PATH`."""
    enabled = not torch.is_grad_enabled() and torch.backends.mha.get_fastpath_enabled()
    return enabled and not module.training and _has_fast_path(module, forward)


def fast_path_conditions(module: nn.Module, forward: Callable[..., Any]) -> list[str]:
    """Return a condition to exclude torch's fused kernel, if ``module`` has one."""
    return [f"not ({FAST_PATH})"] if _has_fast_path(module, forward) else []


def autocast_dtype(call: Call) -> torch.dtype | None:
    """Return the current autocast dtype for the device of ``call``, or None while autocast is off."""
    environment = Environment.of(call, None)
    kind = str(environment.device_type)
    if not environment.can_autocast or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


@dataclass(frozen=True)
class Environment:
    """Environment of a call. Constants of its graph depend on it.

    Attributes:
        device_type: device type of the first tensor of the call; None for a call without tensors.
        autocast: autocast dtype for this device type; None while autocast is off.
    """

    device_type: str | None
    autocast: torch.dtype | None

    @classmethod
    def of(cls, call: Call, autocast: torch.dtype | None) -> Environment:
        """Return the environment of a recorded call."""
        specs = (leaf for _, leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, TensorSpec))
        first = next(specs, None)
        return cls(None if first is None else first.device.type, autocast)

    @property
    def can_autocast(self) -> bool:
        """Whether autocast is available for the device type."""
        return self.device_type is not None and torch.amp.is_autocast_available(self.device_type)

    def inlined(self) -> AbstractContextManager[Any]:
        """Return the autocast block to trace under. It also overrides an enclosing autocast block."""
        if not self.can_autocast:
            return contextlib.nullcontext()
        return quiet_autocast(str(self.device_type), self.autocast)

    def conditions(self, signature: Signature) -> list[str]:
        """Return Python conditions for a call to be made in this environment."""
        first = next((text for text, spec in signature.tensors.items()), None)
        if first is None:
            return []
        found = [device_condition(first, str(self.device_type))]
        if self.can_autocast:
            enabled = f"{signature.name(torch.is_autocast_enabled, 'enabled')}({self.device_type!r})"
            wanted = f"torch.get_autocast_dtype({self.device_type!r}) is {self.autocast}"
            condition = f"{enabled} and {wanted}" if self.autocast is not None else f"not {enabled}"
            if self.autocast is None and self.device_type in _QUICKLY_ASKED:
                condition = f"(not {signature.name(is_any_autocast_enabled, 'some_enabled')}() or {condition})"
            found.append(condition)
        return found


def device_condition(tensor: str, device_type: str) -> str:
    """Return a Python condition for a tensor, given as source, to be on a device type."""
    flag = f"is_{device_type}"  # of those that have one: a sixth of the time
    is_fast = isinstance(getattr(torch.Tensor, flag, None), types.GetSetDescriptorType)
    return f"{tensor}.{flag}" if is_fast else f"{tensor}.device.type == {device_type!r}"
