"""Cross-rank check before the first collective: all ranks must shard and synchronize the same way.

Each rank records the changes made on a group, one line each. Before the first collective after a change, and before the
first one of each op and dtype, the ranks write their lines and their version of torch to the process group's store and
read those of the others. The first difference is reported, and a rank that does not answer within a time limit is an
error. Without the check, the collective would hang or reduce mismatched tensors.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from fused.torch_internals.process_groups import process_group_by_name
from schedule.distributed.communication.exchange import exchanged_strings
from schedule.util.errors import ShardError

LIMIT_VARIABLE = "SCHEDULE_AGREEMENT_SECONDS"
_LIMIT = 120.0
_MOMENT = 0.01

_done: dict[str, list[str]] = {}
_agreed: dict[str, list[str]] = {}
_sent: dict[str, list[str]] = {}  # the kinds of collectives of each group, in the order of their first calls


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


def agree(group: str, collective: str) -> None:
    """Compare ``group`` across ranks if it changed, or if this collective is the first of its kind.

    Args:
        group: name of a process group.
        collective: its op and dtype.

    Raises:
        ShardError: another rank made different changes, calls a different collective, or runs a different version of
            torch (the message names the first difference), or did not answer in time.
    """
    lines, sent = _done.get(group, []), _sent.get(group, [])
    if _agreed.get(group, []) == lines and collective in sent:
        return
    sent = list(dict.fromkeys((*sent, collective)))
    ranks = dist.get_process_group_ranks(process_group_by_name(cast(GroupName, group)))
    if len(ranks) > 1:
        check_same(group, {"steps": lines, "collectives": sent}, ranks)
    _agreed[group], _sent[group] = list(lines), sent


def check_same(about: str, lines: Mapping[str, Sequence[str]], ranks: Sequence[int]) -> None:
    """Compare the version of torch, and lines by subject, across ``ranks``. All of them must call this.

    Raises:
        ShardError: a rank has other lines, or did not answer in time; it is raised on all ranks.
    """
    limit = float(os.environ.get(LIMIT_VARIABLE, _LIMIT))
    error = _first_difference(about, {"torch": [torch.__version__], **lines}, ranks, limit)
    told = exchanged_strings(f"{about} agreed", str(error or ""), ranks, limit if error is None else _MOMENT)
    if error is not None:
        raise error
    for rank, text in told.items():
        if text != "":
            raise ShardError(
                f"rank {rank} stopped before this collective: {text or f'it says nothing within {limit:.0f} s'}",
                fix="look at what it said first",
            )


def _first_difference(
    about: str, ours: Mapping[str, Sequence[str]], ranks: Sequence[int], limit: float
) -> ShardError | None:
    own = dist.get_rank()
    for rank, text in exchanged_strings(about, json.dumps(ours), ranks, limit).items():
        if text is None:
            return ShardError(
                f"rank {rank} did not reach its first collective within {limit:.0f} s of rank {own}",
                fix=f"it died, is slower than that ({LIMIT_VARIABLE} gives it longer), or shards nothing: "
                "every rank must make the same schedule and the same calls",
            )
        theirs = json.loads(text)
        for subject, fix in _FIXES.items():
            here, there = list(ours.get(subject, [])), theirs.get(subject, [])
            if here != there:
                return ShardError(difference(own, here, rank, there, subject), fix=fix)
    return None


_FIXES = {
    "torch": "install the same version on every node",
    "steps": "make the same schedule on every rank",
    "collectives": "give the model and autocast the same dtype on every rank, and make the same calls",
}
_DIFFERENCES = {
    "torch": "the ranks run different versions of torch: rank {0} has {2}, rank {3} has {4}",
    "steps": "the ranks are scheduled differently. Step {1}: rank {0} did {2}, rank {3} did {4}",
    "collectives": "the ranks call different collectives: rank {0} calls {2}, rank {3} calls {4}",
}


def difference(own: int, lines: Sequence[str], rank: int, theirs: Sequence[str], subject: str = "steps") -> str:
    """Describe the first line about ``subject`` with a difference between two ranks."""
    pairs = enumerate(itertools.zip_longest(lines, theirs, fillvalue="nothing more"), 1)
    at, ours, other = next((at, ours, other) for at, (ours, other) in pairs if ours != other)
    return _DIFFERENCES[subject].format(own, at, ours, rank, other)
