"""Memory allocated by a traced forward itself: in-place writes to it are invisible outside, and can be repeated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.tensors import storage_of
from schedule.capture.recording.structure import leaves, tensors
from schedule.capture.tracing.layers import PASSING, is_plain

SHARES = "shares"
"""Key of the metadata of calls: whether the result may share memory with an argument, as seen in the trace."""

_MAY_RETURN_ITS_INPUT = {
    "contiguous", "reshape", "reshape_as", "flatten", "ravel", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_alpha_dropout", "asarray", "as_tensor",
}  # fmt: skip


class Memory:
    """Storages allocated by torch functions and layers for their results during a trace.

    Views share the storage of their base, also without data. A result that may be its argument, depending on strides
    not known beforehand, does not count as new.
    """

    def __init__(self) -> None:
        self._new: dict[int, torch.UntypedStorage] = {}

    def computed(self, func: Any, value: Any, arguments: Any) -> bool:
        """Record the memory of ``value`` returned by ``func`` as new, and return whether it shares that of an argument.

        All tensors are data-free, those of parameters and buffers too. A result that may be its argument is not new.
        """
        with DisableTorchFunction():
            given = [leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
            if getattr(func, "__name__", "") in _MAY_RETURN_ITS_INPUT and not all(map(self.is_new, given)):
                return True
            theirs = set(map(storage_of, given))
            new = [tensor for tensor in tensors(value) if storage_of(tensor) not in theirs]
            self._keep(new)
            return len(new) < len(list(tensors(value)))

    def called(self, child: nn.Module, value: Any, arguments: Any) -> None:
        """Record the memory of ``value`` returned by ``child`` as new, if a plain layer allocated it."""
        passing = isinstance(child, PASSING) or getattr(child, "inplace", False)
        if is_plain(child) and (not passing or self.all_new(arguments)):
            with DisableTorchFunction():
                self._keep(tensors(value))

    def _keep(self, made: Any) -> None:
        for tensor in made:
            self._new[storage_of(tensor)] = tensor.untyped_storage()

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Check whether no code outside the forward can hold ``tensor`` or a view of it."""
        with DisableTorchFunction():
            return storage_of(tensor) in self._new

    def all_new(self, arguments: Any) -> bool:
        """Check whether this holds for all tensors in ``arguments``."""
        return all(self.is_new(leaf) for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
