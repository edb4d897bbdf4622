"""Saved values, memory, gradient and hooks of one tensor, to be compared and restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fused.torch_internals.tensor_kinds import has_own_memory, set_version, storage_of
from schedule.capture.snapshots.contents import Difference, Part
from schedule.capture.snapshots.run_effects import Memory

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class SavedTensor:
    """A tensor's memory, gradient, hooks and values, without a clone of large parameters.

    Whoever frees the memory of a tensor, as FSDP2 does between uses of gathered parameters, fills it again: it has no
    values to save. Neither has a subclass that computes with tensors of its own, which are saved in its place.

    Args:
        live: the tensor, of any class.
        known: memory by the address of its storage; that of ``live`` is added, unless it is cloned.
        cloned: whether to clone it, so that writes past torch are seen too; otherwise an operation has to write to it.
    """

    __slots__ = ("alias", "clone", "freed", "grad", "hooks", "live", "memory", "requires_grad", "version")

    def __init__(self, live: torch.Tensor, known: dict[int, Memory], cloned: bool = True) -> None:
        self.live, self.requires_grad = live, live.requires_grad
        self.grad = live.grad if live.is_leaf else None
        self.hooks = [(table, _hooks(live, table)) for table in _HOOKS]
        own = has_own_memory(type(live))
        self.version = live._version if own and not live.is_inference() else None
        strided = own and live.layout is torch.strided and not live.is_nested
        self.alias = live.detach() if strided else None
        self.freed = self.alias is not None and _freed(live)
        has_values = own and not self.freed and not live.is_meta
        self.clone = live.detach().clone() if has_values and (cloned or not strided) else None
        self.memory = None
        if has_values and self.clone is None:
            self.memory = known.setdefault(storage_of(live), Memory(live.untyped_storage()))

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
        same = alias.dtype == live.dtype and alias.shape == live.shape and alias.stride() == live.stride()
        return same and alias.data_ptr() == live.data_ptr()

    def _was_written(self) -> bool:
        if self.freed or (self.alias is not None and _freed(self.live)):
            return False
        then = self._values()
        if then is None or then.layout is not torch.strided or then.is_nested:
            return self.version is not None and self.live._version != self.version
        if then.dtype.itemsize > 1 and torch.equal(self.live, then):
            return False
        return not torch.equal(_bits(self.live.detach()), _bits(then))

    def _values(self) -> torch.Tensor | None:
        """Return the saved values, or None if there are none, or nothing has written to them."""
        if self.clone is not None or self.alias is None or self.memory is None:
            return self.clone
        return self.memory.values_before(self.alias)

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
            values = self._values()
            if values is None:
                return f"the data of a tensor of shape {tuple(live.shape)} in place"
            with torch.inference_mode(live.is_inference()), torch.no_grad():
                live.copy_(values)
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
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8)
