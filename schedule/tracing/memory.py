"""Which memory a traced forward made itself, so that nobody sees what it does there in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from schedule.tracing.hooks import is_hooked
from schedule.tracing.structure import leaves, tensors

_MAY_RETURN_ITS_INPUT = {
    "contiguous", "reshape", "reshape_as", "flatten", "ravel", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_alpha_dropout", "asarray", "as_tensor",
}  # fmt: skip
_NEW_MEMORY = (nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Memory:
    """Storages that functions of torch made for their results while a forward was traced.

    Views share the storage of what they are views of, also without data. What may be its own argument, depending on
    strides that are not known beforehand, does not count as new.
    """

    def __init__(self) -> None:
        self._new: dict[int, torch.UntypedStorage] = {}

    def computed(self, func: Any, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``func`` gave ``value``: its memory is new unless it is, or may be, that of an argument."""
        given = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if getattr(func, "__name__", "") in _MAY_RETURN_ITS_INPUT and not all(map(self.is_new, given)):
            return
        theirs = {_storage(tensor) for tensor in given}
        for tensor in tensors(value):
            if _storage(tensor) not in theirs:
                self._keep(tensor)

    def made(self, value: Any) -> None:
        """The memory of ``value`` is new."""
        for tensor in tensors(value):
            self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            self._new[storage._cdata] = storage

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether nothing outside the forward can have ``tensor``, or a view of it."""
        return _storage(tensor) in self._new


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def gives_new_memory(child: nn.Module) -> bool:
    """Whether calling ``child`` gives a tensor of its own: its forward is that of a layer of torch's, and no hook's."""
    layer = any(isinstance(child, cls) and type(child).forward is cls.forward for cls in _NEW_MEMORY)
    return layer and not is_hooked(child) and "forward" not in vars(child)
