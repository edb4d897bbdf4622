"""Communication between the ranks of a group, by the group's name, without gradients.

A name stands for a process group of ``torch.distributed``, or for ranks that are threads of this process
(:class:`SimulatedRanks`): a sharded model can be checked where there is one process only.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fused.torch_internals.process_groups import group_size_by_name, process_group_by_name
from schedule.distributed.communication.agreement import agree
from schedule.util.errors import ShardError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_simulated: weakref.WeakValueDictionary[str, SimulatedRanks] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Collective:
    """One collective that simulated ranks made.

    Attributes:
        op: such as ``all_reduce``.
        nbytes: of what each rank gave.
    """

    op: str
    nbytes: int


class SimulatedRanks:
    """Ranks that are threads of one process; each must call :meth:`enter` first.

    Args:
        size: how many.
        limit: seconds after which a rank that waits for the others gives up.
    """

    def __init__(self, size: int, limit: float = 60.0) -> None:
        self.size = size
        self.name = f"simulated {id(self):x}"
        self.made: list[Collective] = []
        self._barrier = threading.Barrier(size, timeout=limit)
        self._given: list[tuple[str, Tensor] | None] = [None] * size
        self._own = threading.local()
        _simulated[self.name] = self

    @property
    def rank(self) -> int:
        """Which of them this thread is."""
        return int(getattr(self._own, "rank", 0))

    def enter(self, rank: int) -> None:
        """This thread is ``rank`` from now on."""
        self._own.rank = rank

    def leave(self) -> None:
        """A rank is gone: the others need not wait for it."""
        self._barrier.abort()

    def exchange(self, op: str, tensor: Tensor) -> list[Tensor]:
        """What every rank gave.

        Raises:
            ShardError: the ranks are not at the same collective, or one does not come.
        """
        self._given[self.rank] = (op, tensor.detach())
        try:
            self._barrier.wait()
            given = [one for one in self._given if one is not None]
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ShardError(
                f"rank {self.rank} waits in {op} of {list(tensor.shape)} for another that does not come",
                fix="look for what the other rank raised, or why it takes another way",
            ) from None
        if len({name for name, _ in given}) > 1:
            seen = "; ".join(f"rank {i}: {name} of {list(one.shape)}" for i, (name, one) in enumerate(given))
            raise ShardError(f"the ranks are at different collectives: {seen}", fix="schedule all ranks the same way")
        if self.rank == 0:
            self.made.append(Collective(op, tensor.numel() * tensor.element_size()))
        return [one for _, one in given]


def group_size(group: str) -> int:
    """How many ranks the group of this name has."""
    ranks = _simulated.get(group)
    return ranks.size if ranks is not None else int(group_size_by_name(cast("GroupName", group)))


def group_rank(group: str) -> int:
    """Which of them this is."""
    ranks = _simulated.get(group)
    return ranks.rank if ranks is not None else int(process_group_by_name(cast("GroupName", group)).rank())


def _made(op: str, group: str, *args: Any) -> Tensor:
    """The result of a collective of ``torch.distributed``, once it is there."""
    agree(group)
    if torch.compiler.is_compiling():
        return _finished(op, group, *args)
    try:
        return _finished(op, group, *args)
    except RuntimeError as error:
        raise ShardError(
            f"{op} of {group_size(group)} ranks failed on rank {group_rank(group)}: {str(error).splitlines()[0]}",
            fix="another rank died, raised or is too slow: look at what it said first",
        ) from error


def _finished(op: str, group: str, *args: Any) -> Tensor:
    pending = getattr(torch.ops._c10d_functional, op)(*args, group)
    finished: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return finished


def summed(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``."""
    if group_size(group) == 1:
        return x.clone()
    ranks = _simulated.get(group)
    if ranks is not None:
        return torch.stack(ranks.exchange("all_reduce", x)).sum(0)
    return _made("all_reduce", group, x.contiguous(), "sum")


def stacked(x: Tensor, group: str) -> Tensor:
    """Every rank's ``x``, all of one shape, side by side along the first dimension."""
    if group_size(group) == 1:
        return x
    ranks = _simulated.get(group)
    if ranks is not None:
        return torch.cat(ranks.exchange("all_gather", x))
    return _made("all_gather_into_tensor", group, x.contiguous(), group_size(group))


def summed_part(x: Tensor, group: str) -> Tensor:
    """This rank's part of the first dimension of the sum; the dimension must divide evenly."""
    size = group_size(group)
    if size == 1:
        return x
    ranks = _simulated.get(group)
    if ranks is not None:
        whole = torch.stack(ranks.exchange("reduce_scatter", x)).sum(0)
        return whole.chunk(size)[ranks.rank].clone()
    return _made("reduce_scatter_tensor", group, x.contiguous(), "sum", size)


def exchanged(x: Tensor, group: str) -> Tensor:
    """The first dimension's part ``i`` goes to rank ``i``; what the ranks sent, side by side."""
    size = group_size(group)
    if size == 1:
        return x
    ranks = _simulated.get(group)
    if ranks is not None:
        return torch.cat([one.chunk(size)[ranks.rank] for one in ranks.exchange("all_to_all", x)])
    parts = [x.shape[0] // size] * size
    return _made("all_to_all_single", group, x.contiguous(), parts, parts)
