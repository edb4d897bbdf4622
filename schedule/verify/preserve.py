"""Runs and training of a model with exact restoration afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from schedule.capture import Snapshot, modes_restored
from schedule.runtime.scheduled import states_in
from schedule.util.generators import generator_states, restore_generators


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Run ``model`` on copies of its parameters and buffers, with gradients cleared, and restore it on exit.

    On exit, also after an error, the original storages, gradients, random generators and all Python state reachable
    from the model (train/eval flags, hooks, attributes and their contents) are restored. The original storages are
    never written to, so this is exact by construction; only sharded tensors, whose storage cannot be swapped, are
    written back bit-exactly.
    """
    generators = generator_states(model)
    tensors = list(_unique((*model.parameters(), *model.buffers())))
    data = [tensor.data for tensor in tensors]
    copies = _copies(data)
    grads = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    state = Snapshot({"self": model}, known=tensors)
    ran = [(own, own.ran) for own in states_in(model)]
    try:
        for tensor, copy in zip(tensors, copies, strict=True):
            if _is_plain(tensor.data):
                tensor.data = copy
        for parameter, _, _ in grads:
            parameter.grad = None
        with modes_restored(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for tensor, original, copy in zip(tensors, data, copies, strict=True):
            if _is_plain(original):
                tensor.data = original
            else:
                original.copy_(copy)
        for parameter, grad, requires_grad in grads:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
        restore_generators(generators)
        for own, what in ran:
            own.ran = what
        state.restore()


def _unique(tensors: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _is_plain(data: torch.Tensor) -> bool:
    """Check whether ``.data`` can be swapped (a DTensor would still use the local tensor inside it)."""
    return type(data) is torch.Tensor and data.layout is torch.strided


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors with the same sharing of storage as the originals (views of one weight stay views)."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor in tensors:
        if not _is_plain(tensor):
            copies.append(tensor.clone())
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr() or id(tensor)
        if key not in storages:
            storages[key] = storage.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        empty.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        copies.append(empty)
    return copies
