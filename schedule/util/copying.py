"""Deep copies with a custom copy function for tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fused.torch_internals.modes import EnableTorchFunction
from schedule.util.internal_errors import perform


class _CopiedBy(TorchFunctionMode):
    """Mode for ``copy.deepcopy`` to copy tensors with a function, including tensors with autograd history."""

    def __init__(self, tensor_copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.tensor_copy = tensor_copy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return perform(func, *args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), self.tensor_copy(tensor))


def copied_where_possible(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return ``copy.deepcopy(value, memo)``, except that what cannot be copied, such as a lock, is shared."""
    memo = {} if memo is None else memo
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever a class raises that is not made to be copied
        if type(value) in (list, tuple):
            return type(value)([copied_where_possible(each, memo) for each in value])
        if type(value) is dict:
            return {key: copied_where_possible(each, memo) for key, each in value.items()}
        return value


def copied(value: Any, tensor_copy: Callable[[torch.Tensor], torch.Tensor], memo: dict[int, Any] | None = None) -> Any:
    """Return ``copy.deepcopy(value, memo)`` with ``tensor_copy(tensor)`` in place of each tensor."""
    with EnableTorchFunction(), _CopiedBy(tensor_copy):
        return copy.deepcopy(value, memo)
