"""A tensor-parallel plan as plain data: what is shared out, and which collectives that takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from schedule.distributed.planning.plan_steps import VOCABULARY, Group, ShardStep, SyncStep, moved
from schedule.distributed.planning.plan_table import plan_table
from schedule.distributed.tensor_parallel.modules import LEFT
from schedule.util.errors import ShardError
from schedule.util.printing import printed


@dataclass
class Plan:
    """What to share out over the tensor-parallel ranks; edit the lists to change it, before it is applied.

    Attributes:
        ranks: for how many it was made.
        groups: what is shared out together.
        whole: path of each larger parameter that stays whole → why.
        boundaries: collectives between the groups, as sequence parallelism needs them.
    """

    ranks: int
    groups: list[Group]
    whole: dict[str, str] = field(default_factory=dict)
    boundaries: list[SyncStep] = field(default_factory=list)

    @property
    def shards(self) -> list[ShardStep]:
        """Of all groups."""
        return [step for group in self.groups for step in group.shards]

    @property
    def syncs(self) -> list[SyncStep]:
        """Of all groups, and between them."""
        return [step for group in self.groups for step in group.syncs] + self.boundaries

    def without(self, text: str) -> Plan:
        """The plan without the groups whose name contains ``text``."""
        return replace(self, groups=[group for group in self.groups if text not in group.name])

    def bytes_moved(self) -> int:
        """Bytes that each rank sends a step of the recorded run, with ring algorithms."""
        steps: list[ShardStep | SyncStep] = [*self.shards, *self.syncs]
        return sum(moved(step, self.ranks) for step in steps)

    def to_json(self) -> str:
        """As JSON; :meth:`from_json` reads it back."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ShardError: it is no such text.
        """
        try:
            found: Mapping[str, Any] = json.loads(text)
            groups = [
                Group(
                    group["name"],
                    group["size"],
                    [ShardStep(**step) for step in group["shards"]],
                    [SyncStep(**step) for step in group["syncs"]],
                    group["kind"],
                )
                for group in found["groups"]
            ]
            boundaries = [SyncStep(**step) for step in found["boundaries"]]
            return cls(found["ranks"], groups, dict(found["whole"]), boundaries)
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f"that is no plan: {error}", fix="give the text that plan.to_json() returned") from error

    def table(self) -> Table:
        """The groups as a table of rich, alike layers in one row: what is shared out, what each rank sends a step."""
        return plan_table(self.ranks, self.groups, self.boundaries, self.bytes_moved())

    def __str__(self) -> str:
        return printed(self.table()).rstrip()


def common_path(paths: Iterable[str]) -> str:
    """The module above all of ``paths``; "" is the root."""
    shared = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def with_parallel_loss(plan: Plan) -> Plan:
    """``plan`` with logits that stay shared out over the vocabulary.

    Raises:
        ShardError: it shares out no projection onto the vocabulary.
    """

    def left(step: SyncStep) -> SyncStep:
        return replace(step, op=LEFT) if (step.mode, step.op) == ("fwd_post", "all_gather") else step

    groups = [
        replace(group, syncs=[*map(left, group.syncs)]) if group.kind == VOCABULARY else group for group in plan.groups
    ]
    if groups == plan.groups:
        raise ShardError(
            "the plan shards no projection onto the vocabulary, so the loss has whole logits",
            fix="leave out parallel_loss",
        )
    return replace(plan, groups=groups)
