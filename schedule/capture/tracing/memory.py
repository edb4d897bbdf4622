"""Memory allocated by a traced forward itself: in-place writes to it are invisible outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.modules import DropoutBase
from schedule.capture.recording.structure import leaves, tensors
from schedule.capture.tracing.hooks import is_hooked

_MAY_RETURN_ITS_INPUT = {
    "contiguous", "reshape", "reshape_as", "flatten", "ravel", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_alpha_dropout", "asarray", "as_tensor",
}  # fmt: skip
_NEW_MEMORY = {
    f"torch.nn.modules.{name}"
    for name in ("linear", "sparse", "conv", "normalization", "batchnorm", "instancenorm", "pooling", "activation")
}
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, DropoutBase)


class Memory:
    """Storages allocated by torch functions for their results during a trace.

    Views share the storage of their base, also without data. A result that may be its argument, depending on strides
    not known beforehand, does not count as new.
    """

    def __init__(self) -> None:
        self._new: dict[int, torch.UntypedStorage] = {}

    def computed(self, func: Any, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the memory of ``value`` returned by ``func`` as new, unless an argument may share it."""
        given = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if getattr(func, "__name__", "") in _MAY_RETURN_ITS_INPUT and not all(map(self.is_new, given)):
            return
        theirs = {_storage(tensor) for tensor in given}
        for tensor in tensors(value):
            if _storage(tensor) not in theirs:
                self._keep(tensor)

    def called(self, child: nn.Module, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the memory of ``value`` returned by ``child`` as new, if a torch layer allocated it."""
        if not _is_torchs(child):
            return
        given = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        passing = isinstance(child, _PASSING) or getattr(child, "inplace", False)
        if all(map(self.is_new, given)) if passing else _defines_forward(child).__module__ in _NEW_MEMORY:
            for tensor in tensors(value):
                self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        with DisableTorchFunction():
            storage = tensor.untyped_storage()
            self._new[storage._cdata] = storage

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Check whether no code outside the forward can hold ``tensor`` or a view of it."""
        return _storage(tensor) in self._new


def _storage(tensor: torch.Tensor) -> int:
    with DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _is_torchs(child: nn.Module) -> bool:
    """Check whether ``child`` runs the unmodified forward of a torch layer without hooks."""
    own = is_hooked(child) or "forward" in vars(child) or "_schedule_state" in vars(child)
    return not own and _defines_forward(child).__module__.startswith("torch.nn.modules.")


def _defines_forward(child: nn.Module) -> type:
    return next(cls for cls in type(child).__mro__ if "forward" in vars(cls))
