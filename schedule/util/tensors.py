"""Access to tensors of a module by path, and to this rank's part of a DTensor."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_at(root: nn.Module, path: str) -> Tensor:
    """Return the parameter, buffer or attribute of ``root`` at a dotted path."""
    owner, _, name = path.rpartition(".")
    tensor: Tensor = getattr(root.get_submodule(owner), name)
    return tensor
