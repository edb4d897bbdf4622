"""Collectives without gradients, over a group given by name.

A name refers to a process group of ``torch.distributed``, or to ranks simulated as threads of this process
(:class:`SimulatedRanks`). The latter allow a sharded model to be checked in a single process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fused.torch_internals.process_groups import group_size_by_name, process_group_by_name
from schedule.distributed.communication.agreement import agree
from schedule.util.errors import ShardError
from schedule.util.generators import generator_states, restore_generators

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_simulated: weakref.WeakValueDictionary[str, SimulatedRanks] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Collective:
    """One collective executed by simulated ranks.

    Attributes:
        op: name of the collective, such as ``all_reduce``.
        nbytes: bytes of the input of one rank.
    """

    op: str
    nbytes: int


class SimulatedRanks:
    """Ranks simulated as threads of one process, each of them within :meth:`running`.

    They run one at a time, from one collective to the next. Each draws the random numbers that a process of its own
    with the same seeds would draw.

    Args:
        size: number of ranks.
        limit: seconds for which a rank waits for the others before it fails.
    """

    def __init__(self, size: int, limit: float = 60.0) -> None:
        self.size = size
        self.name = f"simulated {id(self):x}"
        self.made: list[Collective] = []
        self._barrier = threading.Barrier(size, timeout=limit)
        self._given: list[tuple[str, Tensor] | None] = [None] * size
        self._own = threading.local()
        self._turn = threading.Lock()
        self._states = [generator_states()] * size
        _simulated[self.name] = self

    @property
    def rank(self) -> int:
        """Rank of the current thread."""
        return int(getattr(self._own, "rank", 0))

    @contextmanager
    def running(self, rank: int) -> Iterator[None]:
        """Run the block as one rank in the current thread."""
        self._own.rank = rank
        self._resume()
        try:
            yield
        finally:
            self._pause()

    def _resume(self) -> None:
        self._turn.acquire()
        restore_generators(self._states[self.rank])

    def _pause(self) -> None:
        self._states[self.rank] = generator_states()
        self._turn.release()

    def leave(self) -> None:
        """Abort the barrier because a rank has exited and the others need not wait for it."""
        self._barrier.abort()

    def exchange(self, op: str, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order.

        Raises:
            ShardError: the ranks are at different collectives, or one does not arrive in time.
        """
        self._given[self.rank] = (op, tensor.detach())
        self._pause()
        try:
            self._barrier.wait()
            given = [one for one in self._given if one is not None]
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ShardError(
                f"rank {self.rank} waits in {op} of {list(tensor.shape)} for another that does not come",
                fix="look for what the other rank raised, or why it takes another way",
            ) from None
        finally:
            self._resume()
        if len({name for name, _ in given}) > 1:
            seen = "; ".join(f"rank {i}: {name} of {list(one.shape)}" for i, (name, one) in enumerate(given))
            raise ShardError(f"the ranks are at different collectives: {seen}", fix="schedule all ranks the same way")
        if self.rank == 0:
            self.made.append(Collective(op, tensor.numel() * tensor.element_size()))
        return [one for _, one in given]


def group_size(group: str) -> int:
    """Return the number of ranks in the group of this name."""
    ranks = _simulated.get(group)
    return ranks.size if ranks is not None else int(group_size_by_name(cast("GroupName", group)))


def group_rank(group: str) -> int:
    """Return the rank of this process or simulated thread in the group of this name."""
    ranks = _simulated.get(group)
    return ranks.rank if ranks is not None else int(process_group_by_name(cast("GroupName", group)).rank())


def _made(op: str, group: str, x: Tensor, *args: Any) -> Tensor:
    """Run a collective of ``torch.distributed`` and return its finished result."""
    if torch.compiler.is_compiling():
        return _finished(op, group, x, *args)
    agree(group, f"{op} of {x.dtype}")
    try:
        return _finished(op, group, x, *args)
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
    """All-reduce ``x`` with a sum."""
    if group_size(group) == 1:
        return x.clone()
    ranks = _simulated.get(group)
    if ranks is not None:
        return torch.stack(ranks.exchange("all_reduce", x)).sum(0)
    return _made("all_reduce", group, x.contiguous(), "sum")


def stacked(x: Tensor, group: str) -> Tensor:
    """All-gather ``x``, of the same shape on all ranks, along the first dimension."""
    if group_size(group) == 1:
        return x
    ranks = _simulated.get(group)
    if ranks is not None:
        return torch.cat(ranks.exchange("all_gather", x))
    return _made("all_gather_into_tensor", group, x.contiguous(), group_size(group))


def summed_part(x: Tensor, group: str) -> Tensor:
    """Reduce-scatter ``x`` with a sum along the first dimension (divisible by the number of ranks)."""
    size = group_size(group)
    if size == 1:
        return x
    ranks = _simulated.get(group)
    if ranks is not None:
        whole = torch.stack(ranks.exchange("reduce_scatter", x)).sum(0)
        return whole.chunk(size)[ranks.rank].clone()
    return _made("reduce_scatter_tensor", group, x.contiguous(), "sum", size)


def exchanged(x: Tensor, group: str, sent: Sequence[int] = (), received: Sequence[int] = ()) -> Tensor:
    """Send chunk ``i`` of the first dimension to rank ``i``, and concatenate the received chunks (all-to-all).

    Args:
        x: the chunks for all ranks.
        group: name of the process group.
        sent: size of the chunk for each rank; equal chunks if left out.
        received: size of the chunk from each rank.
    """
    size = group_size(group)
    if size == 1:
        return x
    equal = [x.shape[0] // size] * size
    sent, received = list(sent or equal), list(received or equal)
    ranks = _simulated.get(group)
    if ranks is not None:
        parts = torch.nn.utils.rnn.pad_sequence(list(x.split(sent)), batch_first=True)
        given = ranks.exchange("all_to_all", parts)
        return torch.cat([one[ranks.rank, :own] for one, own in zip(given, received, strict=True)])
    return _made("all_to_all_single", group, x.contiguous(), received, sent)
