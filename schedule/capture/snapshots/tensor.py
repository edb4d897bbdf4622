"""Saved values, storage, gradient and hooks of one tensor, to be compared and restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fused.torch_internals.tensors import FakeTensor, set_version
from schedule.capture.snapshots.pieces import Difference, Part

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
SMALL = 2**14
"""A parameter of at most so many numbers is cloned; of a larger one it is only noticed that it was written to."""


class SavedTensor:
    """A tensor's storage, gradient, hooks and values, without a clone of large parameters.

    Whoever frees the memory of a tensor, as FSDP2 does between uses of gathered parameters, fills it again: it has no
    values to save.
    """

    __slots__ = ("alias", "clone", "freed", "grad", "hooks", "live", "requires_grad", "version")

    def __init__(self, live: torch.Tensor) -> None:
        self.live, self.requires_grad = live, live.requires_grad
        self.grad = live.grad if live.is_leaf else None
        self.hooks = [(table, _hooks(live, table)) for table in _HOOKS]
        self.version = None if live.is_inference() else live._version
        plain = live.layout is torch.strided and not live.is_nested and not isinstance(live, FakeTensor)
        plain = plain and type(live) in (torch.Tensor, nn.Parameter, nn.Buffer)
        self.alias = live.detach() if plain else None
        self.freed = plain and _freed(live)
        cloned = (
            plain
            and not self.freed
            and not live.is_meta
            and (live.numel() <= SMALL or not isinstance(live, nn.Parameter))
        )
        self.clone = live.detach().clone() if cloned else None

    def parts(self) -> Iterable[Part]:
        """Return no parts."""
        return ()

    def difference(self) -> Difference | None:
        """Return a difference in memory, ``requires_grad``, gradient, hooks or values, or None."""
        if not self._same_memory():
            return "", "other memory, or another shape"
        if self.live.requires_grad != self.requires_grad:
            return ".requires_grad", f"{self.live.requires_grad}, was {self.requires_grad}"
        if self.live.is_leaf and self.live.grad is not self.grad:
            return ".grad", "another gradient"
        if any(_hooks(self.live, table) != then for table, then in self.hooks):
            return "", "other hooks"
        return ("", "other values") if self._was_written() else None

    def _same_memory(self) -> bool:
        alias, live = self.alias, self.live
        if alias is None:
            return True
        return alias.shape == live.shape and alias.stride() == live.stride() and alias.data_ptr() == live.data_ptr()

    def _was_written(self) -> bool:
        if self.freed or (self.alias is not None and _freed(self.live)):
            return False
        if self.clone is None:
            return self.version is not None and self.live._version != self.version
        now, then = self.live.detach(), self.clone
        return not torch.equal(now, then) and not torch.equal(_bits(now), _bits(then))

    def restore(self) -> str | None:
        """Restore memory, gradient, hooks and values, or return the reason for a failure."""
        live = self.live
        with torch.no_grad():
            if self.alias is not None and not self._same_memory():
                live.data = self.alias
            if live.is_leaf and live.requires_grad != self.requires_grad:
                live.requires_grad_(self.requires_grad)
            if live.is_leaf and live.grad is not self.grad:
                live.grad = self.grad
            for table, then in self.hooks:
                _put_hooks(live, table, then)
            if not self._was_written():
                return None
            if self.clone is None:
                return f"the data of a tensor of shape {tuple(live.shape)} in place"
            with torch.inference_mode(live.is_inference()), torch.no_grad():
                live.copy_(self.clone)
            if self.version is not None:  # a graph of autograd that has saved it finds what it saved
                set_version(live, self.version)
        return None


def _freed(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def _hooks(tensor: torch.Tensor, table: str) -> dict[int, Any]:
    return dict(getattr(tensor, table) or {})


def _put_hooks(tensor: torch.Tensor, table: str, hooks: dict[int, Any]) -> None:
    """Set the hooks of ``tensor``, in place if it has had some: handles of hooks refer to the table."""
    current = getattr(tensor, table)
    if not current or dict(current) == hooks:
        return
    if hooks:
        current.clear()
        current.update(hooks)
    else:
        setattr(tensor, table, None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as bytes, since NaNs do not compare equal."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
