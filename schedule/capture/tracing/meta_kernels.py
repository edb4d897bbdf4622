"""Meta kernels for torch functions unsupported on data-free tensors by torch itself."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from schedule.capture.recording.structure import tensors
from schedule.util.internal_errors import perform


def _tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> torch.Tensor:
    """Build ``torch.tensor(data)`` for lists with tensors too, without reading the tensors' data."""
    if not isinstance(data, (list, tuple)) or not any(True for _ in tensors(data)):
        how: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
        return perform(torch.tensor, data, **how, pin_memory=pin_memory)
    stacked = torch.stack([item if isinstance(item, torch.Tensor) else _tensor(item) for item in data])
    return torch.empty_like(stacked, dtype=dtype, device=device, requires_grad=requires_grad)


def _picked(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Index ``tensor[index]``, with 0-d integer tensors replaced by 0: the shape does not depend on their value."""
    parts = index if isinstance(index, tuple) else (index,)
    numbers = tuple(0 if _is_number(part) else part for part in parts)
    return perform(operator.getitem, tensor, numbers)


def _is_number(value: Any) -> bool:
    """Check whether ``value`` is a 0-d integer tensor, used by an index as a number."""
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 0
        and not value.is_floating_point()
        and value.dtype not in (torch.bool, torch.uint8)
    )


_META_KERNELS: dict[Any, Callable[..., Any]] = {torch.tensor: _tensor, torch.Tensor.__getitem__: _picked}


def meta_kernel(function: Any) -> Callable[..., Any]:
    """Return the meta kernel for ``function``, by default the function itself."""
    return _META_KERNELS.get(function, function)
