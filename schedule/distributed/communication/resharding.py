"""Resharding from one dimension to another, written as ``"RS->SR"``.

The notation has one letter per dimension: R for replicated, S for sharded. Source: Slapo's ``sync``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from schedule.distributed.communication.collectives import (
    divided_evenly,
    gather_from_tensor_parallel,
    move_in_tensor_parallel,
    scatter_to_tensor_parallel,
)
from schedule.distributed.communication.groups import group_size
from schedule.util.errors import ShardError


class Resharding:
    """A function resharding a tensor, and its gradient in the reverse direction.

    A replicated tensor has the same gradient on every rank, so slicing is the adjoint of gathering, without a sum.

    ==========  ===========================================
    notation    what the ranks do
    ==========  ===========================================
    RS -> RR    all-gather along the last dimension
    RR -> SR    each keeps its part of the first dimension
    RS -> SR    all-to-all
    ==========  ===========================================

    Args:
        notation: for example ``"RRS->RSR"``, with one letter per dimension of the tensor.
        group: name of the process group.

    Raises:
        ShardError: the notation is invalid, or shards two dimensions over one group.

    Attributes:
        before: the layout on the left, such as ``"RRS"``.
        after: the layout on the right.
    """

    def __init__(self, notation: str, group: str) -> None:
        self.notation = self.__name__ = notation.replace(" ", "")
        self.group = group
        before, _, after = self.notation.partition("->")
        if not before or len(before) != len(after) or set(before + after) - {"R", "S"}:
            raise ShardError(
                f"{notation!r} is not a resharding",
                fix='a letter R or S for each dimension, before and after: "RS->SR"',
            )
        if max(before.count("S"), after.count("S")) > 1:
            raise ShardError(f"{notation!r} shards two dimensions over one group", fix="one S on each side")
        self.before, self.after = before, after
        self.dims, self.source, self.target = len(before), before.find("S"), after.find("S")

    def then(self, other: Resharding) -> Resharding:
        """Return both reshardings in one, this one first.

        Raises:
            ShardError: ``other`` does not start from the layout that this one gives.
        """
        if other.before != self.after:
            raise ShardError(
                f"{other.notation} starts from {other.before}, and {self.notation} before it gives {self.after}",
                fix=f'a resharding "{self.after}->…", or undo the first',
            )
        return Resharding(f"{self.before}->{other.after}", self.group)

    def check_whole(self, shape: Sequence[int], ranks: int) -> None:
        """Check that a tensor of this whole shape can be resharded.

        Raises:
            ShardError: it has a different number of dimensions, or one does not divide evenly over the ranks.
        """
        self._check_rank(shape)
        for dim in {self.source, self.target} - {-1}:
            divided_evenly(shape[dim], ranks, dim)

    def _check_rank(self, shape: Sequence[int]) -> None:
        if len(shape) != self.dims:
            raise ShardError(
                f"{self.notation!r} is about {self.dims} dimensions, and the tensor {list(shape)} has {len(shape)}",
                fix=f"{len(shape)} letters on each side",
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Reshard ``x`` to the layout on the right side of the notation.

        Raises:
            ShardError: ``x`` has a different number of dimensions, or one does not divide evenly over the ranks.
        """
        self._check_rank(x.shape)
        if self.source == self.target:
            return x
        if self.source < 0:
            divided_evenly(x.shape[self.target], group_size(self.group), self.target)
            return scatter_to_tensor_parallel(x, self.group, self.target)
        if self.target < 0:
            return gather_from_tensor_parallel(x, self.group, self.source)
        return move_in_tensor_parallel(x, self.group, self.source, self.target)
