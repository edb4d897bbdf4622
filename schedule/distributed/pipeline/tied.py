"""Gradient sums of weights shared by stages on several ranks, such as tied embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fused.sharding import local_part


class TiedGradients:
    """The shared parameters of one pipeline.

    All ranks of the job must create it together, since it creates process groups.

    Args:
        parameters: the parameters of each stage.
        size: number of ranks of the pipeline; stage i is on rank ``i % size``.
        lines: global ranks of every such pipeline of the job, in order.
    """

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]], size: int, lines: Sequence[Sequence[int]]) -> None:
        holders: dict[nn.Parameter, set[int]] = {}
        for index, own in enumerate(parameters):
            for parameter in own:
                holders.setdefault(parameter, set()).add(index % size)
        self.shared: list[tuple[nn.Parameter, Any]] = []
        groups: dict[tuple[int, ...], Any] = {}
        for parameter, ranks in holders.items():
            together = tuple(sorted(ranks))
            if len(together) == 1:
                continue
            if together not in groups:
                groups[together] = _own_group([[line[rank] for rank in together] for line in lines])
            if groups[together] is not None:
                self.shared.append((parameter, groups[together]))

    @contextmanager
    def summed(self) -> Iterator[None]:
        """All-reduce the gradients computed in the block, and add them to the previous gradients."""
        before = [parameter.grad for parameter, _ in self.shared]
        for parameter, _ in self.shared:
            parameter.grad = None
        try:
            yield
            for parameter, group in self.shared:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_part(parameter.grad), group=group)
        finally:
            for (parameter, _), grad in zip(self.shared, before, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def _own_group(enumeration: Sequence[Sequence[int]]) -> Any:
    """Create one group per list of ranks, and return the group of this rank or None."""
    own = None
    for ranks in enumeration:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    return own
