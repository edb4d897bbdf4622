"""Slots for the meta-device tensors of a model, filled in place with data later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused.sharding import local_part
from schedule.distributed.checkpoint.stored_layout import Layout


@dataclass(eq=False)
class Slot:
    """One parameter or buffer without data, under every name it goes by; later the same object with data.

    Attributes:
        tensor: the object in the model.
        layout: what of it this rank holds.
        owners: tables of modules, and names in them.
        paths: names from the root.
        persistent: whether it is part of a ``state_dict``.
    """

    tensor: Tensor
    layout: Layout
    owners: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    persistent: bool = True

    def allocate(self, empty: Callable[..., Tensor]) -> Tensor:
        """Put a whole tensor made by ``empty(shape, dtype=…)`` into the model temporarily, and return it."""
        made = self._like(empty(self.layout.shape, dtype=self.tensor.dtype))
        self.put(made)
        return made

    def put(self, tensor: Tensor) -> None:
        """Put ``tensor`` into every entry of ``owners``."""
        for table, name in self.owners:
            table[name] = tensor

    def put_back(self) -> None:
        """Put the original tensor back into every entry of ``owners``."""
        self.put(self.tensor)

    def empty_share(self, device: torch.device | str) -> Tensor:
        """Return an uninitialized tensor for this rank's shard."""
        return torch.empty(self.layout.local_shape, dtype=self.tensor.dtype, device=device)

    def fill(self, share: Tensor) -> None:
        """Fill the tensor with this rank's shard, keeping the same tensor object."""
        old = self.tensor
        if isinstance(old, DTensor):
            how: dict[str, Any] = dict(run_check=False, shape=old.shape, stride=old.stride())
            share = DTensor.from_local(share, old.device_mesh, old.placements, **how)
        made = self._like(share.detach())
        torch.utils.swap_tensors(old, made)
        self.put_back()

    def _like(self, tensor: Tensor) -> Tensor:
        if not isinstance(self.tensor, nn.Parameter):
            return tensor
        made = nn.Parameter(tensor, self.tensor.requires_grad)
        vars(made).update(vars(self.tensor))
        return made


def meta_slots(root: nn.Module) -> list[Slot]:
    """Return a slot for every meta tensor of ``root``, in module order."""
    found: dict[int, Slot] = {}
    for path, module in root.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or not is_meta(tensor):
                    continue
                slot = found.setdefault(id(tensor), Slot(tensor, Layout.of(tensor)))
                slot.owners.append((table, name))
                slot.paths.append(f"{path}.{name}".lstrip("."))
                slot.persistent = slot.persistent and name not in module._non_persistent_buffers_set
    return list(found.values())


def is_meta(tensor: Tensor) -> bool:
    """Check whether ``tensor`` (for a DTensor, its local shard) is on the meta device."""
    return local_part(tensor).is_meta
