"""Which shards and synchronisations contradict each other, with the reason and the fix."""

from __future__ import annotations

from torch import nn

from schedule.distributed.modules import (
    COLUMN,
    ROW,
    ModuleSharding,
    Projection,
    Split,
    Sync,
    incomplete,
    projection_of,
    sharding_of,
)
from schedule.errors import ShardError
from schedule.tracing.specialisation import original_class

# -- what may be sharded ------------------------------------------------------------------------------------


def check_split(module: nn.Module, name: str, split: Split, ranks: int, sharding: ModuleSharding | None) -> None:
    """Refuse to share out one parameter of ``module`` where its forward could not follow.

    Raises:
        ShardError: says which and what to do.
    """
    projection = projection_of(module)
    if projection is None:
        raise ShardError(
            f"{original_class(module).__name__} has no sharded forward",
            fix="shard the Linear or Conv1D modules in it",
        )
    role = sharding.role(module) if sharding else None
    if name == "weight":
        own = COLUMN if split.axis == projection.output else ROW
        if own == ROW and sharding is not None and "bias" in sharding.splits:
            raise ShardError(
                "the bias is sharded, and a row-parallel module adds a whole bias to the sum over the ranks",
                fix="undo the shard of the bias",
            )
    elif role == ROW:
        raise ShardError(
            "a row-parallel module adds its whole bias after the sum over the ranks",
            fix=f"leave the bias whole; or shard the weight along axis {projection.output}",
        )
    _check_parts(module, name, split, ranks, projection, role, sharding)


def _check_parts(
    module: nn.Module,
    name: str,
    split: Split,
    ranks: int,
    projection: Projection,
    role: str | None,
    sharding: ModuleSharding | None,
) -> None:
    other = (sharding.splits if sharding else {}).get("bias" if name == "weight" else "weight")
    if other is not None and other.parts != split.parts:
        raise ShardError(
            f"the weight and the bias hold the same outputs, in {other.parts} and {split.parts} packed parts",
            fix=f"shard both with parts={max(other.parts, split.parts)}",
        )
    if split.parts == 1:
        return
    if name == "weight" and split.axis != projection.output:
        raise ShardError("only outputs can be packed", fix=f"shard axis {projection.output}, or leave out parts")
    size = module._parameters[name].shape[split.axis]  # type: ignore[union-attr]
    if split.parts < 1 or size % (split.parts * ranks):
        raise ShardError(
            f"{size} outputs are not {split.parts} parts that {ranks} ranks can share evenly",
            fix="use as many ranks as divide each part",
        )


# -- what may be synchronised -------------------------------------------------------------------------------

MODES = ("fwd_pre", "fwd_post", "bwd_post")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")

_GATHER_INSTEAD = 'sync("fwd_post", "all_gather"), or leave the outputs to a row-parallel module'
_REDUCE_INSTEAD = 'sync("fwd_post", "all_reduce")'

_REFUSED: dict[tuple[str, str, str], tuple[str, str]] = {
    (COLUMN, "fwd_pre", "all_reduce"): ("its input is whole on every rank, no partial sum", "leave it out"),
    (COLUMN, "fwd_pre", "reduce_scatter"): ("its input is whole on every rank, no partial sum", "leave it out"),
    (COLUMN, "fwd_pre", "scatter"): (
        "a column-parallel module multiplies the whole input",
        "shard the weight along its inputs, or leave out the scatter",
    ),
    (COLUMN, "fwd_post", "all_reduce"): (
        "each rank holds other outputs of a column-parallel module: adding them up mixes features",
        _GATHER_INSTEAD,
    ),
    (COLUMN, "fwd_post", "reduce_scatter"): (
        "each rank holds other outputs of a column-parallel module: adding them up mixes features",
        _GATHER_INSTEAD,
    ),
    (COLUMN, "fwd_post", "scatter"): ("its outputs are shared out already", "leave it out"),
    (COLUMN, "bwd_post", "all_gather"): (
        "each rank has a part of the sum, not of the gradient",
        'sync("bwd_post", "all_reduce")',
    ),
    (COLUMN, "bwd_post", "reduce_scatter"): (
        "that is the gradient of a gathered input",
        'sync("fwd_pre", "all_gather", axis=…), which does both',
    ),
    (COLUMN, "bwd_post", "scatter"): ("the gradient is a partial sum", 'sync("bwd_post", "all_reduce")'),
    (ROW, "fwd_pre", "all_reduce"): ("each rank has other inputs of a row-parallel module", "leave it out"),
    (ROW, "fwd_pre", "reduce_scatter"): ("each rank has other inputs of a row-parallel module", "leave it out"),
    (ROW, "fwd_pre", "all_gather"): (
        "a row-parallel module multiplies its own share of the inputs only",
        "shard the weight along its outputs, or leave out the all_gather",
    ),
    (ROW, "fwd_post", "all_gather"): ("its outputs are partial sums, to be added up", _REDUCE_INSTEAD),
    (ROW, "fwd_post", "scatter"): (
        "its outputs are partial sums, to be added up",
        _REDUCE_INSTEAD + ' or "reduce_scatter"',
    ),
    (ROW, "bwd_post", "all_reduce"): (
        "each rank has the gradient of its own inputs: adding them up mixes features",
        'sync("bwd_post", "all_reduce") the column-parallel module before it',
    ),
    (ROW, "bwd_post", "all_gather"): (
        "that is the gradient of a scattered input",
        'sync("fwd_pre", "scatter"), which does both',
    ),
    (ROW, "bwd_post", "reduce_scatter"): ("each rank has the gradient of its own inputs", "leave it out"),
    (ROW, "bwd_post", "scatter"): ("each rank has the gradient of its own inputs", "leave it out"),
}


def check_sync(module: nn.Module, sharding: ModuleSharding | None, mode: str, sync: Sync) -> None:
    """Refuse a synchronisation that contradicts how ``module`` is shared out.

    Raises:
        ShardError: gives the reason and the fix.
    """
    if mode not in MODES:
        raise ShardError(f"there is no mode {mode!r}", fix=f"one of {', '.join(MODES)}")
    if isinstance(sync.op, str) and sync.op not in OPS:
        raise ShardError(f"there is no collective {sync.op!r}", fix=f"one of {', '.join(OPS)}, or a function")
    role = sharding.role(module) if sharding else None
    if sharding is None or role is None:
        raise ShardError("its weight is not sharded, so there is nothing to synchronise", fix="shard it first")
    if mode in sharding.syncs:
        raise ShardError(f"{mode} has {sharding.syncs[mode]} already", fix="undo that sync first")
    refused = _REFUSED.get((role, mode, sync.op)) if isinstance(sync.op, str) else None
    if refused is not None:
        raise ShardError(f"{sync} in {mode} of a {role}-parallel module: {refused[0]}", fix=refused[1])
    _check_pair(sharding, mode, sync)
    _check_axis(sharding, mode, sync)


def _check_pair(sharding: ModuleSharding, mode: str, sync: Sync) -> None:
    """A gathered input has a reduced gradient already."""
    pair = {mode: sync.op} | {other: one.op for other, one in sharding.syncs.items()}
    if pair.get("fwd_pre") == "all_gather" and pair.get("bwd_post") == "all_reduce":
        raise ShardError(
            'the gradient of fwd_pre "all_gather" is reduced and scattered already; bwd_post would do it twice',
            fix="keep one: all_gather for an input that is shared out, all_reduce for one that is whole",
        )


def _check_axis(sharding: ModuleSharding, mode: str, sync: Sync) -> None:
    if sync.axis is None:
        if sync.op == "reduce_scatter" or (sync.op == "all_gather" and mode == "fwd_pre"):
            raise ShardError(f"{sync.op} needs the axis to share out", fix=f'sync("{mode}", "{sync.op}", axis=1)')
        return
    if not isinstance(sync.axis, int) or isinstance(sync.axis, bool):
        raise ShardError(f"an axis is a number, not {sync.axis!r}")
    if sync.op in ("scatter", "all_gather") and mode != "fwd_pre" and sync.axis != -1:
        raise ShardError("the outputs are shared out along the last axis", fix="axis=-1, or leave it out")
    if sync.op == "all_reduce":
        raise ShardError("an all_reduce has no axis", fix="leave it out")
    if sync.op == "scatter" and sync.axis != -1:
        raise ShardError("a row-parallel module has its inputs along the last axis", fix="axis=-1")
    if mode == "fwd_post" and sync.op == "all_gather" and any(s.parts > 1 for s in sharding.splits.values()):
        raise ShardError("packed outputs side by side would be in another order", fix="gather after they are split")


# -- what is missing ----------------------------------------------------------------------------------------


def missing_syncs(root: nn.Module) -> list[str]:
    """What the sharded modules of ``root`` still need to compute what whole ones do, one line for each."""
    found = []
    for path, module in root.named_modules():
        sharding = sharding_of(module)
        if sharding is None or projection_of(module) is None:
            continue
        role, why = sharding.role(module), incomplete(module, sharding)
        if why:
            found.append(f"{path}: {why}")
        elif role == ROW and "fwd_post" not in sharding.syncs:
            found.append(f'{path}: nobody adds its partial sums up: .sync("fwd_post", "all_reduce")')
        elif role == COLUMN and not _input_reduced(root, path, sharding):
            found.append(
                f"{path}: nobody adds the gradients of its input up: "
                '.sync("bwd_post", "all_reduce"), or on the module that calls it'
            )
    return found


def _input_reduced(root: nn.Module, path: str, sharding: ModuleSharding) -> bool:
    if sharding.syncs.keys() & {"bwd_post", "fwd_pre"}:
        return True
    parts = path.split(".")
    above = (sharding_of(root.get_submodule(".".join(parts[:depth]))) for depth in range(len(parts)))
    return any(one is not None and "bwd_post" in one.syncs for one in above)
