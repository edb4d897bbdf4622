"""Sharding of a layer's features over a tensor-parallel group, and the collectives with their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shares:
    """One rank's share of a layer.

    Args:
        group: the ranks, any object with ``size()`` and ``rank()``.
        ranks, rank: the number of ranks, and the index of this one.
        parts: the number of equal parts packed along the features; each part is sharded.
    """

    group: Any
    ranks: int
    rank: int
    parts: int = 1

    @classmethod
    def of(cls, op: str, what: str, size: int, parts: int, group: Any) -> Shares | None:
        """Return this rank's share of `size` features, or None without a group of several ranks.

        Raises:
            ValueError: if the features cannot be sharded evenly.
        """
        if group is None or group.size() == 1:
            return None
        ranks = group.size()
        if size % (parts * ranks):
            packed = f" in {parts} packed parts" if parts > 1 else ""
            raise ValueError(f"{op}: {size} {what}{packed} cannot be shared evenly by {ranks} ranks")
        return cls(group, ranks, group.rank(), parts)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group for a collective.

        Raises:
            TypeError: if it is no group of torch.
        """
        if not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(
                f"the tensor-parallel group is a {type(self.group).__name__} of {self.ranks} ranks, which is enough to "
                "build and save their layers, but not to communicate; give a torch.distributed.ProcessGroup"
            )
        return self.group

    def cut(self, whole: Tensor, axis: int) -> Tensor:
        """Return this rank's shard of a full tensor."""
        pieces = whole.chunk(self.parts * self.ranks, axis)
        return torch.cat(pieces[self.rank :: self.ranks], axis)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return _side_by_side(x, shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.shares.ranks, -1)[ctx.shares.rank].contiguous(), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return x.chunk(shares.ranks, -1)[shares.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(grad, ctx.shares), None


def _side_by_side(x: Tensor, shares: Shares) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(shares.ranks)]
    dist.all_gather(parts, x.contiguous(), group=shares.process_group)
    return torch.cat(parts, -1)


def copied(x: Tensor, shares: Shares) -> Tensor:
    """Return the replicated `x`, and all-reduce its gradients."""
    result: Tensor = _Copied.apply(x, shares.process_group)
    return result


def summed(x: Tensor, shares: Shares) -> Tensor:
    """All-reduce `x` over the ranks, and pass the gradient unchanged."""
    result: Tensor = _Summed.apply(x, shares.process_group)
    return result


def gathered(x: Tensor, shares: Shares) -> Tensor:
    """All-gather `x` along the last dimension, and take this rank's part of the gradient."""
    result: Tensor = _Gathered.apply(x, shares)
    return result


def own_part(x: Tensor, shares: Shares) -> Tensor:
    """Return this rank's part of the last dimension of a replicated `x`, and all-gather the gradients."""
    result: Tensor = _OwnPart.apply(x, shares)
    return result
