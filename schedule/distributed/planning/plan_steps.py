"""The steps of a tensor-parallel plan, and the groups that they are made in."""

from __future__ import annotations

from dataclasses import dataclass, field

from schedule.distributed.tensor_parallel.modules import LEFT


@dataclass(frozen=True)
class ShardStep:
    """One call of ``shard``.

    Attributes:
        path: the module.
        name: of the parameter.
        axis: which is shared out.
        parts: how many are packed along it.
        replicas: how many ranks after one another have the same share.
        common: how many of the last every rank has.
        nbytes: of the gradient, if the parameter stays whole, so that it is added up over the ranks.
    """

    path: str
    name: str
    axis: int
    parts: int = 1
    replicas: int = 1
    common: int = 0
    nbytes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class SyncStep:
    """One call of ``sync``.

    Attributes:
        path: the module.
        mode: ``"fwd_pre"``, ``"fwd_post"``, ``"bwd_pre"`` or ``"bwd_post"``.
        op: the collective, or a resharding.
        axis: the dimension that is shared out.
        argument: the input or parameter of a module that is no projection.
        nbytes: of the whole tensor in the recorded run.
    """

    path: str
    mode: str
    op: str
    axis: int | None = None
    argument: str | None = None
    nbytes: int = field(default=0, compare=False)


HEADS, FEATURES, VOCABULARY = "heads", "features", "tokens"


@dataclass(frozen=True)
class Group:
    """Axes of parameters that are shared out together, with the collectives that this takes.

    Attributes:
        name: where it is.
        size: how many are shared out.
        shards: in order.
        syncs: in order.
        kind: of what: the heads of an attention, other features, or the tokens of a vocabulary.
    """

    name: str
    size: int
    shards: list[ShardStep]
    syncs: list[SyncStep]
    kind: str = FEATURES


def moved(step: ShardStep | SyncStep, ranks: int) -> int:
    """Bytes that each rank sends for one step, forward and backward, with ring algorithms.

    An all-reduce of n bytes sends 2·n·(ranks − 1)/ranks; a gather or a reduce-scatter half of that, each way.
    """
    part = step.nbytes * (ranks - 1) // ranks
    if isinstance(step, ShardStep) or step.op == "all_reduce":
        return 2 * part
    if step.op == LEFT:
        return 0
    if step.op == "all_gather" and step.mode == "fwd_post":
        return part  # its gradient is this rank's part
    return part if step.op == "scatter" or "->" in step.op else 2 * part
