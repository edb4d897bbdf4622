"""Access to tensors of a module by path."""

from __future__ import annotations

from torch import Tensor, nn


def tensor_at(root: nn.Module, path: str) -> Tensor:
    """Return the parameter, buffer or attribute of ``root`` at a dotted path."""
    owner, _, name = path.rpartition(".")
    tensor: Tensor = getattr(root.get_submodule(owner), name)
    return tensor
