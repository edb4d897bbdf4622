"""Resharding from one dimension to another, written as ``"RS->SR"``.

The notation has one letter per dimension: R for replicated, S for sharded. Source: Slapo's ``sync``.
"""

from __future__ import annotations

from torch import Tensor

from schedule.distributed.communication.collectives import (
    gather_from_tensor_parallel,
    move_in_tensor_parallel,
    scatter_to_tensor_parallel,
)
from schedule.util.errors import ShardError


class Resharding:
    """A function resharding a tensor, and its gradient in the reverse direction.

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
    """

    __name__ = "resharding"

    def __init__(self, notation: str, group: str) -> None:
        self.notation, self.group = notation, group
        before, _, after = notation.replace(" ", "").partition("->")
        if not before or len(before) != len(after) or set(before + after) - {"R", "S"}:
            raise ShardError(
                f"{notation!r} is not a resharding",
                fix='a letter R or S for each dimension, before and after: "RS->SR"',
            )
        if max(before.count("S"), after.count("S")) > 1:
            raise ShardError(f"{notation!r} shards two dimensions over one group", fix="one S on each side")
        self.dims, self.source, self.target = len(before), before.find("S"), after.find("S")

    def __call__(self, x: Tensor) -> Tensor:
        """Reshard ``x`` to the layout on the right side of the notation.

        Raises:
            ShardError: ``x`` has a different number of dimensions, or one does not divide evenly over the ranks.
        """
        if x.ndim != self.dims:
            raise ShardError(
                f"{self.notation!r} is about {self.dims} dimensions, and the tensor {list(x.shape)} has {x.ndim}",
                fix=f"{x.ndim} letters on each side",
            )
        if self.source == self.target:
            return x
        if self.source < 0:
            return scatter_to_tensor_parallel(x, self.group, self.target)
        if self.target < 0:
            return gather_from_tensor_parallel(x, self.group, self.source)
        return move_in_tensor_parallel(x, self.group, self.source, self.target)
