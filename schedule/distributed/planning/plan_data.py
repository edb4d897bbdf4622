"""A tensor-parallel plan as plain data: the sharded parameters and the necessary collectives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from schedule.distributed.planning.plan_steps import VOCABULARY, Group, ShardStep, SyncStep, moved
from schedule.distributed.planning.plan_table import plan_table
from schedule.distributed.tensor_parallel.sharded_modules import LEFT
from schedule.util.errors import ShardError
from schedule.util.printing import printed


@dataclass
class Plan:
    """Parameters to shard over the tensor-parallel ranks, with the necessary collectives.

    Edit the lists to change the plan before it is applied.

    Attributes:
        ranks: the number of ranks for which it was made.
        groups: the parameters sharded together, with their collectives.
        whole: path of each unsharded parameter of at least two dimensions → the reason. Sequence parallelism adds
            the chains of layers that cannot use it.
        boundaries: collectives between the groups, as sequence parallelism needs them.
    """

    ranks: int
    groups: list[Group]
    whole: dict[str, str] = field(default_factory=dict)
    boundaries: list[SyncStep] = field(default_factory=list)

    @property
    def shards(self) -> list[ShardStep]:
        """The shard steps of all groups."""
        return [step for group in self.groups for step in group.shards]

    @property
    def syncs(self) -> list[SyncStep]:
        """The sync steps of all groups and between them."""
        return [step for group in self.groups for step in group.syncs] + self.boundaries

    def without(self, text: str) -> Plan:
        """Return the plan without the groups with ``text`` in their names.

        A ``text`` that ends in a digit is not part of a longer number: ``"h.1"`` is not in ``"h.10.mlp"``.
        """
        named = re.compile(re.escape(text) + (r"(?!\d)" if text[-1:].isdigit() else ""))
        return replace(self, groups=[group for group in self.groups if not named.search(group.name)])

    def bytes_moved(self) -> int:
        """Return the number of bytes sent by each rank per training step of the recorded run, with ring algorithms."""
        exchanges = [step for group in self.groups for step in group.exchanges]
        steps: list[ShardStep | SyncStep] = [*self.shards, *self.syncs, *exchanges]
        return sum(moved(step, self.ranks) for step in steps)

    def to_json(self) -> str:
        """Return the plan as JSON for :meth:`from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from the JSON of :meth:`to_json`.

        Raises:
            ShardError: the text is not the JSON of a plan.
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
                    [SyncStep(**step) for step in group.get("exchanges", ())],
                )
                for group in found["groups"]
            ]
            boundaries = [SyncStep(**step) for step in found["boundaries"]]
            return cls(found["ranks"], groups, dict(found["whole"]), boundaries)
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(
                f"that is not a plan: {error}", fix="give the text that plan.to_json() returned"
            ) from error

    def table(self) -> Table:
        """Return a rich table of the groups, their collectives and the bytes sent per rank and step.

        Groups of equal layers share a row.
        """
        return plan_table(self.ranks, self.groups, self.boundaries, self.bytes_moved())

    def __str__(self) -> str:
        return printed(self.table()).rstrip()


def common_path(paths: Iterable[str]) -> str:
    """Return the path of the innermost module above all of ``paths`` ("" for the root)."""
    shared = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def with_parallel_loss(plan: Plan) -> Plan:
    """Return ``plan`` with logits left sharded over the vocabulary.

    Raises:
        ShardError: the plan does not shard a projection onto the vocabulary.
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
