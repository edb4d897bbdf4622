"""What each rank found, shared through the store: a verification passes on all ranks, or fails on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from schedule.distributed.mesh import tensor_parallel
from schedule.errors import VerificationError

_turns = iter(range(1 << 62))


class Verdicts:
    """The verdicts of the ranks of a schedule's mesh.

    Args:
        ranks: of the default group.
        limit: seconds that one rank waits for another.
    """

    def __init__(self, ranks: list[int], limit: float) -> None:
        self.ranks, self.limit = ranks, limit

    def share(self, own: str) -> None:
        """Tell the others what was found, "" if nothing, and hear from them.

        Raises:
            VerificationError: one of them found something, or says nothing in time; names the ranks.
        """
        store, turn, rank = _get_default_store(), next(_turns), dist.get_rank()
        store.set(f"schedule/verdict/{turn}/{rank}", own or "-")
        found: dict[int, str] = {}
        for each in self.ranks:
            try:
                store.wait([f"schedule/verdict/{turn}/{each}"], timedelta(seconds=self.limit))
                found[each] = store.get(f"schedule/verdict/{turn}/{each}").decode()
            except RuntimeError:
                found[each] = f"says nothing within {self.limit:.0f} s: it hangs, is slow, or died"
        wrong = {each: text for each, text in found.items() if text != "-"}
        if wrong:
            right = [str(each) for each in self.ranks if each not in wrong]
            others = f" (as it should be on rank {', '.join(right)})" if right else ""
            raise VerificationError(
                "; ".join(f"rank {each}: {text}" for each, text in wrong.items()) + others,
                fix="undo the shards and syncs of the modules that it names one by one; "
                "schedule.distributed.missing_syncs(model) finds reductions left out",
            )


def verdicts_of(mesh: Any, limit: float) -> Verdicts | None:
    """The verdicts of a mesh of several ranks; None for a schedule on one device."""
    if not isinstance(mesh, dist.device_mesh.DeviceMesh) or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(tensor_parallel(mesh).mesh.get_group())  # type: ignore[union-attr]
    return Verdicts(ranks, limit) if len(ranks) > 1 else None


@contextmanager
def limited(mesh: Any, limit: float) -> Iterator[None]:
    """Within, a collective on the mesh's tensor-parallel group that takes longer is an error and no hang."""
    if verdicts_of(mesh, limit) is None:
        yield
        return
    group = tensor_parallel(mesh).mesh.get_group()  # type: ignore[union-attr]
    before = group._get_backend(torch.device(mesh.device_type)).options._timeout
    _set_pg_timeout(timedelta(seconds=limit), group)
    try:
        yield
    finally:
        _set_pg_timeout(before, group)
