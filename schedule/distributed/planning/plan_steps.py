"""Steps of a tensor-parallel plan and their groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from schedule.distributed.tensor_parallel.sharded_modules import ATTENTION, LEFT, MEANS


@dataclass(frozen=True)
class ShardStep:
    """One call of ``shard``.

    Attributes:
        path: the path of the module.
        name: the name of the parameter.
        axis: the sharded axis.
        parts: the number of parts packed along the axis.
        replicas: the number of consecutive ranks with the same shard.
        common: the number of last elements along the axis that are replicated on every rank.
        nbytes: the bytes of the gradient if the parameter stays whole and its gradient is all-reduced, otherwise 0.
    """

    path: str
    name: str
    axis: int
    parts: int = 1
    replicas: int = 1
    common: int = 0
    nbytes: int = field(default=0, compare=False)


def steps_below(steps: Iterable[ShardStep], path: str) -> list[ShardStep]:
    """Return the steps for the module at ``path`` and its submodules, with paths relative to it."""
    prefix = path and f"{path}."
    inside = [step for step in steps if f"{step.path}.".startswith(prefix)]
    return [replace(step, path=step.path.removeprefix(path).lstrip(".")) for step in inside]


@dataclass(frozen=True)
class SyncStep:
    """One call of ``sync``.

    Attributes:
        path: the path of the module.
        mode: ``"fwd_pre"``, ``"fwd_post"``, ``"bwd_pre"`` or ``"bwd_post"``; ``"fwd_mean"`` for the means in a norm of
            sharded features; ``"fwd_attention"`` for the keys and values of a module that runs on a part of the
            sequence by ``context_parallel``.
        op: the collective, or a resharding.
        axis: the sharded dimension.
        argument: the name of the input or parameter, for a module that is not a projection.
        nbytes: the bytes of the whole tensor in the recorded run.
        ranks: the number of ranks that take part, if these are not the ranks of the plan.
    """

    path: str
    mode: str
    op: str
    axis: int | None = None
    argument: str | None = None
    nbytes: int = field(default=0, compare=False)
    ranks: int | None = None


HEADS, FEATURES, VOCABULARY, EXPERTS, POSITIONS = "heads", "features", "tokens", "experts", "positions"


@dataclass(frozen=True)
class Group:
    """Parameter axes sharded together, with the necessary collectives.

    Attributes:
        name: the path of the module around the group, or the names of the vocabulary modules.
        size: the number of heads, features, tokens or experts that are sharded.
        shards: the shard steps in order.
        syncs: the sync steps in order.
        kind: the kind of dimension: the heads of an attention, other features, the tokens of a vocabulary, whole
            experts (by ``shard_experts``), or the positions of a sequence.
        exchanges: the collectives made inside the module, besides the sync steps.
    """

    name: str
    size: int
    shards: list[ShardStep]
    syncs: list[SyncStep]
    kind: str = FEATURES
    exchanges: list[SyncStep] = field(default_factory=list)


def moved(step: ShardStep | SyncStep, ranks: int) -> int:
    """Return the number of bytes sent by each rank for one plan step, forward and backward, with ring algorithms.

    An all-reduce of n bytes sends 2·n·(ranks − 1)/ranks; an all-gather or a reduce-scatter sends half as
    much in each direction.
    """
    if isinstance(step, SyncStep) and step.ranks is not None:
        ranks = step.ranks
    part = step.nbytes * (ranks - 1) // ranks
    if isinstance(step, SyncStep) and step.mode == MEANS:
        return 4 * part  # with its gradient
    if isinstance(step, ShardStep) or step.op == "all_reduce":
        return 2 * part
    if step.op == LEFT:
        return 0
    if step.op == "all_gather" and step.mode not in ("fwd_pre", ATTENTION):
        return part  # its gradient is this rank's part
    return part if step.op in ("scatter", "all_to_all") or "->" in step.op else 2 * part
