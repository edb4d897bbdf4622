"""Indices out of range, on a card as on the CPU.

A model that is tried at a size that it does not take, such as more positions than it has embeddings, raises an
IndexError on the CPU. A card finds the index while it computes: the whole process can no longer use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.node import map_aggregate

from fused.torch_internals.modes import TorchDispatchMode
from schedule.util.internal_errors import as_python_does, perform
from schedule.util.named_values import named_tensors

RAISING = frozenset({"cpu", "meta"})
"""Types of devices on which torch raises for an index out of range."""

_WORDS = ("range", "bounds")
"""Words of which one is in each error of torch for an index."""


@contextmanager
def indices_checked(values: Any) -> Iterator[None]:
    """Raise IndexError in the block for an index out of range on the device of `values`, before the device sees it.

    Only the operations of torch itself are checked, where one of the tensors in `values` is on such a device.

    Args:
        values: arguments, parameters: nested structures of tensors.
    """
    if all(tensor.device.type in RAISING for tensor in named_tensors(values).values()):
        yield
        return
    with _Checked():
        yield


class _Checked(TorchDispatchMode):
    """Mode to run each operation with an index on the CPU first, on other numbers of the same sizes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_torch = getattr(func, "namespace", "") == "aten"
        if of_torch and torch.Tag.pointwise not in func.tags and _may_index((args, kwargs)):
            try:
                perform(func, *map_aggregate(args, _on_cpu), **map_aggregate(kwargs, _on_cpu))
            except (IndexError, RuntimeError) as error:
                if any(word in str(error) for word in _WORDS):
                    raise as_python_does(IndexError(str(error))) from None
                # Another error is that of the CPU alone, or comes from the device in the same way.
        return perform(func, *args, **kwargs)


def _may_index(given: Any) -> bool:
    """Check whether these are plain tensors on a device, one of them with integers."""
    found: list[torch.Tensor] = []
    map_aggregate(given, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in found)
    return plain and len(found) > 1 and any(map(_is_index, found))


def _is_index(tensor: torch.Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole and tensor.device.type not in RAISING


def _on_cpu(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
    if not leaf.is_floating_point():
        return leaf.to("cpu", copy=True)
    # Memory that is not written takes no time. The CPU lacks some operations in 16 bits.
    dtype = torch.float32 if leaf.dtype.itemsize < 4 else leaf.dtype
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype)
