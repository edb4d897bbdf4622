"""Effects of one run outside of its results: entries of dicts, memory of tensors, modes of torch."""

from __future__ import annotations

import decimal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fused.torch_internals.modes import PassiveDispatchMode
from fused.torch_internals.schemas import OpOverload, written_arguments
from fused.torch_internals.tensor_kinds import FakeTensor, has_own_memory, storage_of
from schedule.util.internal_errors import perform

# -- Entries of dicts ---------------------------------------------------------------------------------------


MISSING = object()
"""Marker for the value of a missing entry."""


@dataclass(frozen=True, eq=False)
class Entry:
    """Dict entry set, added or removed by a run.

    Attributes:
        table: the dict; for an attribute, the ``__dict__`` of the object.
        key: the key of the entry.
        before: its value before the run, or :data:`MISSING`.
        after: its value after the run, or :data:`MISSING`.
    """

    table: dict[Any, Any]
    key: Any
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        """Set the entry to ``value``, or remove it."""
        if value is MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


# -- Memory of tensors, copied before an operation writes to it ---------------------------------------------


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


# -- Restoring of torch modes switched by a forward ---------------------------------------------------------


@contextmanager
def modes_restored() -> Iterator[None]:
    """Restore gradient mode, default dtype, determinism, autocast and the context of ``decimal`` on exit."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    try:
        with decimal.localcontext():
            yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for device, enabled, autocast_to in autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, autocast_to)
