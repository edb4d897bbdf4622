"""Example inputs with values for a model with values, and without for one on the meta device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from schedule.util.copying import copied
from schedule.util.named_values import named_tensors


def has_values(model: nn.Module) -> bool:
    """Return whether no parameter or buffer of ``model`` is on the meta device."""
    return not any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))


def placed(model: nn.Module, batch: Any) -> Any:
    """Return ``batch`` as ``model`` can be called with it, the same object if it can be already.

    A model on the meta device is called with tensors without values. For a model with values, tensors on the meta
    device are replaced by tensors of their shapes: normal numbers, the same at every call, and ones for integers and
    flags, which are valid ids, positions and masks.
    """
    tensors = named_tensors(batch).values()
    if not has_values(model):
        away = any(not tensor.is_meta for tensor in tensors)
        return copied(batch, lambda tensor: tensor.detach().to("meta")) if away else batch
    if not any(tensor.is_meta for tensor in tensors):
        return batch
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    numbers = torch.Generator().manual_seed(0)

    def valued(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
        drawn = torch.randn(tensor.shape, generator=numbers, dtype=torch.promote_types(tensor.dtype, torch.float32))
        return drawn.to(device, tensor.dtype).requires_grad_(tensor.requires_grad)

    return copied(batch, valued)
