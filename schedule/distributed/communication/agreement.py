"""Cross-rank check before the first collective: all ranks must shard and synchronize the same way.

Each rank records the changes made on a group, one line each. Before the first collective after a change, the ranks
write their lines to the process group's store and read the lines of the others. The first difference is reported, and a
rank that does not answer within a time limit is an error. Without the check, the collective would hang or reduce
mismatched tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from fused.torch_internals.process_groups import process_group_by_name
from schedule.distributed.communication.exchange import exchanged_strings
from schedule.util.errors import ShardError

LIMIT_VARIABLE = "SCHEDULE_AGREEMENT_SECONDS"
_LIMIT = 120.0

_done: dict[str, list[str]] = {}
_agreed: dict[str, list[str]] = {}


class Noted:
    """A recorded change to the sharding of one group, compared across ranks."""

    def __init__(self, group: str, line: str) -> None:
        self.group, self.line = group, line

    def apply(self) -> None:
        """Record the line."""
        _done.setdefault(self.group, []).append(self.line)

    def revert(self) -> None:
        """Remove the latest matching line."""
        lines = _done.get(self.group, [])
        if self.line in lines:
            del lines[len(lines) - 1 - lines[::-1].index(self.line)]


def agree(group: str) -> None:
    """Compare the recorded changes of ``group`` across ranks, if they changed since the last comparison.

    Raises:
        ShardError: another rank made different changes (the message names the first difference), or did not answer in
            time.
    """
    lines = _done.get(group, [])
    if _agreed.get(group, []) == lines or torch.compiler.is_compiling():
        return
    process_group = process_group_by_name(cast(GroupName, group))
    ranks = dist.get_process_group_ranks(process_group)
    if len(ranks) > 1:
        _compare(group, lines, ranks)
    _agreed[group] = list(lines)


def _compare(group: str, lines: list[str], ranks: list[int]) -> None:
    own, limit = dist.get_rank(), float(os.environ.get(LIMIT_VARIABLE, _LIMIT))
    for rank, theirs in exchanged_strings(group, "\n".join(lines), ranks, limit).items():
        if theirs is None:
            raise ShardError(
                f"rank {rank} did not reach its first collective within {limit:.0f} s of rank {own}",
                fix=f"it died, is slower than that ({LIMIT_VARIABLE} gives it longer), or shards nothing: "
                "every rank must make the same schedule and the same calls",
            )
        if theirs.split("\n") != (lines or [""]):
            different = difference(own, lines, rank, theirs.split("\n"))
            raise ShardError(different, fix="make the same schedule on every rank")


def difference(own: int, lines: Sequence[str], rank: int, theirs: Sequence[str]) -> str:
    """Describe the first step done differently by two ranks."""
    for at in range(max(len(lines), len(theirs))):
        ours = lines[at] if at < len(lines) else "nothing more"
        other = theirs[at] if at < len(theirs) else "nothing more"
        if ours != other:
            return f"the ranks are scheduled differently. Step {at + 1}: rank {own} did {ours}, rank {rank} did {other}"
    return "the ranks are scheduled differently"
