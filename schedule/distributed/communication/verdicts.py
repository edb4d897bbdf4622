"""Exchange of verification results, so a verification passes or fails on all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from schedule.distributed.communication.agreement import difference
from schedule.distributed.communication.exchange import exchanged_strings
from schedule.distributed.communication.mesh import expert_parallel, has_expert_dimension, tensor_parallel
from schedule.util.errors import VerificationError


class Verdicts:
    """Exchange of verification results between the ranks of a schedule's mesh.

    Args:
        ranks: global ranks.
        limit: seconds for which one rank waits for another.
    """

    def __init__(self, ranks: list[int], limit: float) -> None:
        self.ranks, self.limit = ranks, limit

    def told(self, own: str) -> dict[int, str | None]:
        """All-gather one string per rank, with None for a rank not answering in time."""
        return exchanged_strings("verdict", own, self.ranks, self.limit)

    def wrong(self, own: str) -> dict[int, str]:
        """All-gather errors and return the non-empty ones by rank.

        ``own`` is the error of this rank, or "" if there is none. A missing answer counts as an error.
        """
        silent = f"says nothing within {self.limit:.0f} s: it hangs, is slow, or died"
        found = {rank: silent if text is None else text for rank, text in self.told(own).items()}
        return {rank: text for rank, text in found.items() if text}

    def differing(self, steps: Sequence[str]) -> str | None:
        """Describe the first difference between the schedules of the ranks.

        The result is "" if they are equal, and None if a rank does not answer in time or has no steps.
        """
        told = self.told("\n".join(steps))
        own = dist.get_rank()
        for rank, text in told.items():
            if not text:
                return None
            if text.split("\n") != list(steps):
                return difference(own, steps, rank, text.split("\n"))
        return ""

    def agreed(self, right: bool) -> bool:
        """Check whether ``right`` is true on every rank."""
        return not self.wrong("" if right else "wrong")

    def error(self, wrong: dict[int, str], cause: str) -> VerificationError:
        """Return the result of :meth:`wrong` as an error naming the ranks and, if known, the cause."""
        right = [str(rank) for rank in self.ranks if rank not in wrong]
        others = f" (as it should be on rank {', '.join(right)})" if right else ""
        return VerificationError(
            "; ".join([*filter(None, [cause]), *(f"rank {rank}: {text}" for rank, text in wrong.items())]) + others,
            fix="undo or correct it; schedule.distributed.missing_syncs(model) finds reductions that were left out",
        )


def verdicts_of(mesh: Any, limit: float) -> Verdicts | None:
    """Return the verdicts for a mesh of several ranks, or None for a schedule on one device."""
    if not isinstance(mesh, dist.device_mesh.DeviceMesh) or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(_groups(mesh)[-1])
    return Verdicts(ranks, limit) if len(ranks) > 1 else None


@contextmanager
def limited(mesh: Any, limit: float) -> Iterator[None]:
    """Limit the time of the collectives of sharded modules, so a hang becomes an error."""
    if verdicts_of(mesh, limit) is None:
        yield
        return
    groups, device = _groups(mesh), torch.device(mesh.device_type)
    before = [group._get_backend(device).options._timeout for group in groups]
    for group in groups:
        group.set_timeout(timedelta(seconds=limit))
    try:
        yield
    finally:
        for group, timeout in zip(groups, before, strict=True):
            group.set_timeout(timeout)


def _groups(mesh: Any) -> list[dist.ProcessGroup]:
    """Return the process groups of sharded modules, the largest last."""
    made = [tensor_parallel(mesh), *([expert_parallel(mesh)] if has_expert_dimension(mesh) else [])]
    return [each.mesh.get_group() for each in made if each.mesh is not None]
