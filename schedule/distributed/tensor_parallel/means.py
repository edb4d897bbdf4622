"""Means over features that are sharded over the ranks, such as those of an RMS norm of all heads' queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from schedule.distributed.communication import collectives
from schedule.distributed.communication.groups import group_size
from schedule.util.internal_errors import perform


class MeansOverRanks(TorchFunctionMode):
    """Makes every ``mean`` of this thread one over the ranks of a group, with shards of equal size.

    The mean is replicated and combined with sharded values, so its gradient is a partial sum, and is all-reduced too.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Average the result of the one function over the ranks, and run all others as they are."""
        result = perform(func, *args, **(kwargs or {}))
        if func not in (torch.mean, Tensor.mean):
            return result
        summed = collectives.reduce_from_tensor_parallel(result, self.group)
        return collectives.copy_to_tensor_parallel(summed / group_size(self.group), self.group)
