"""Memory of tensors, copied before an operation writes to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fused.torch_internals.modes import PassiveDispatchMode
from fused.torch_internals.schemas import OpOverload, written_arguments
from fused.torch_internals.tensors import FakeTensor, has_own_memory, storage_of
from schedule.util.internal_errors import perform


class Memory:
    """A storage, and its bytes from before the first write to it that a :class:`CopyOnWrite` saw."""

    __slots__ = ("_before", "_storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._before: torch.UntypedStorage | None = None

    def copy_before_write(self) -> None:
        """Copy the bytes, unless that was done."""
        if self._before is None:
            self._before = self._storage.clone()

    def values_before(self, alias: torch.Tensor) -> torch.Tensor | None:
        """Return what ``alias``, a tensor in this storage, contained before the first write, or None without one."""
        if self._before is None:
            return None
        empty = torch.empty(0, dtype=alias.dtype, device=alias.device)
        return empty.set_(self._before, alias.storage_offset(), alias.shape, alias.stride())


class CopyOnWrite(PassiveDispatchMode):
    """Mode that copies known memory before an operation writes to it, whatever tensor it writes through.

    Operators declare in their schemas what they write to. A write past torch, such as one through
    ``tensor.numpy()``, is not seen.

    Args:
        memory: by the address of the storage.
    """

    def __init__(self, memory: Mapping[int, Memory]) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return perform(func, *args, **kwargs)
        if not all(map(has_own_memory, types)):  # the mode sees the tensors that they compute with next
            return NotImplemented
        for tensor in written_arguments(func, args, kwargs) if isinstance(func, OpOverload) else ():
            memory = self._memory.get(storage_of(tensor)) if _has_storage(tensor) else None
            if memory is not None:
                memory.copy_before_write()
        return perform(func, *args, **kwargs)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
