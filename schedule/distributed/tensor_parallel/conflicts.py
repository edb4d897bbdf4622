"""Checks for contradictory shards and synchronizations, with the reason and the fix."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from schedule.capture import original_class
from schedule.distributed.tensor_parallel.reshardings import check_layout
from schedule.distributed.tensor_parallel.sharded_modules import (
    CHANNEL,
    COLUMN,
    CONVOLUTIONS,
    LEFT,
    MEANS,
    OWN,
    ROW,
    ModuleSharding,
    Projection,
    Split,
    Sync,
    incomplete,
    input_names,
    projection_of,
    role_of,
    sharding_of,
    sync_key,
)
from schedule.util.errors import ShardError

# -- what may be sharded ------------------------------------------------------------------------------------


def check_split(module: nn.Module, name: str, split: Split, ranks: int, sharding: ModuleSharding | None) -> None:
    """Raise if the forward of ``module`` does not support this split of a parameter.

    Raises:
        ShardError: gives the reason and the fix.
    """
    made, projection = role_of(module, name, split.axis), projection_of(module)
    role = sharding.role(module) if sharding else None
    for key, sync in (sharding.syncs if sharding else {}).items():
        check_layout(module, sharding.with_split(name, split), key.split()[0], sync)  # type: ignore[union-attr]
    if made is None:
        raise ShardError(_no_forward(module, name, split), fix="shard the Linear or Conv1D modules in it")
    if name == "weight" and made == ROW and sharding is not None and "bias" in sharding.splits:
        raise ShardError(
            "the bias is sharded, and a row-parallel module adds a whole bias to the sum over the ranks",
            fix="undo the shard of the bias",
        )
    if name == "bias" and role == ROW:
        axis = 0 if projection is None else projection.output
        raise ShardError(
            "a row-parallel module adds its whole bias after the sum over the ranks",
            fix=f"leave the bias whole; or shard the weight along axis {axis}",
        )
    if made == OWN or projection is None:
        _check_other(module, name, split, ranks, made)
        return
    _check_parts(module, name, split, ranks, projection, role, sharding)


def _no_forward(module: nn.Module, name: str, split: Split) -> str:
    cls = original_class(module).__name__
    if isinstance(module, nn.Embedding):
        return f"{cls} with max_norm, scale_grad_by_freq or sparse gradients needs its whole table"
    if isinstance(module, CONVOLUTIONS):
        return f"{cls} of {module.groups} groups has no sharded forward along axis {split.axis} of its {name}"
    return f"{cls} has no sharded forward"


def _check_other(module: nn.Module, name: str, split: Split, ranks: int, made: str) -> None:
    """Check a split of a convolution, an embedding, a batch norm, or a module with its own parameters."""
    if split.stays_whole:
        raise ShardError("replicas and common are for projections", fix="leave them out")
    if split.parts > 1 and (made != OWN or split.size % (split.parts * ranks)):
        raise ShardError(
            f"{split.size} along axis {split.axis} are not {split.parts} parts that {ranks} ranks can share evenly",
            fix="leave out parts, or use as many ranks as divide each part",
        )
    groups = getattr(module, "groups", 1)
    if made == CHANNEL and groups > 1 and groups % ranks:
        raise ShardError(
            f"its {groups} groups cannot be shared evenly by {ranks} ranks", fix="as many ranks as divide the groups"
        )


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
    if split.replicas > 1 and (split.parts > 1 or ranks % split.replicas or split.size * split.replicas % ranks):
        raise ShardError(
            f"{ranks} ranks in groups of {split.replicas} cannot share {split.size} outputs evenly",
            fix="as many replicas as there are ranks for one head",
        )
    if other is not None and other.common != split.common:
        raise ShardError(
            f"the weight and the bias hold the same outputs, {other.common} and {split.common} of them common",
            fix=f"shard both with common={max(other.common, split.common)}",
        )
    if split.common and (
        split.parts > 1 or split.replicas > 1 or (name == "weight" and split.axis != projection.output)
    ):
        raise ShardError("only outputs can be common, without parts or replicas", fix="leave out common")
    if split.common < 0 or (split.common and (split.size - split.common) % ranks):
        raise ShardError(
            f"{split.size} outputs, {split.common} of them common, cannot be shared evenly by {ranks} ranks",
            fix="use as many ranks as divide those that are not common",
        )
    if split.parts != 1:
        _check_packed(module, name, split, ranks, projection)


def _check_packed(module: nn.Module, name: str, split: Split, ranks: int, projection: Projection) -> None:
    if name == "weight" and split.axis != projection.output:
        raise ShardError("only outputs can be packed", fix=f"shard axis {projection.output}, or leave out parts")
    size = module._parameters[name].shape[split.axis]  # type: ignore[union-attr]
    if split.parts < 1 or size % (split.parts * ranks):
        raise ShardError(
            f"{size} outputs are not {split.parts} parts that {ranks} ranks can share evenly",
            fix="use as many ranks as divide each part",
        )


# -- what may be synchronized -------------------------------------------------------------------------------

MODES = ("fwd_pre", "fwd_post", "bwd_pre", "bwd_post", MEANS)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "scatter")  # and "dtensor", of projections alone

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
    (COLUMN, "fwd_post", "scatter"): ("its outputs are sharded already", "leave it out"),
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
    (ROW, "fwd_post", "all_gather"): ("its outputs are partial sums, to be reduced", _REDUCE_INSTEAD),
    (ROW, "fwd_post", "scatter"): (
        "its outputs are partial sums, to be reduced",
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


def check_names(mode: str, sync: Sync) -> None:
    """Raise for unknown modes and collectives.

    Raises:
        ShardError: lists the valid ones.
    """
    if mode not in MODES:
        raise ShardError(f"there is no mode {mode!r}", fix=f"one of {', '.join(MODES)}")
    if isinstance(sync.op, str) and sync.op not in (*OPS, LEFT):
        raise ShardError(
            f"there is no collective {sync.op!r}", fix=f'one of {", ".join(OPS)}, "RS->SR", or a function of the tensor'
        )
    if sync.reshards and mode not in ("fwd_pre", "fwd_post"):
        raise ShardError(
            f"{sync} in {mode}: the gradient of a resharding goes the way back by itself",
            fix="reshard in fwd_pre or fwd_post",
        )


def _gives_partial(module: nn.Module) -> bool:
    sharding = sharding_of(module)
    role = sharding.role(module) if sharding is not None else None
    return sharding is not None and role in (ROW, OWN) and "fwd_post" not in sharding.syncs


def check_boundary(module: nn.Module, sharding: ModuleSharding | None, mode: str, sync: Sync) -> None:
    """Raise if a module other than a projection cannot make this synchronization of its inputs or output.

    Raises:
        ShardError: gives the reason and the fix.
    """
    check_names(mode, sync)
    key, own = sync_key(mode, sync.argument), {**module._parameters, **module._buffers}
    _check_free(sharding, key, sync)
    allowed = {"fwd_pre": ("all_gather", "scatter"), "bwd_post": ("all_reduce",)}.get(mode, OPS)
    if isinstance(sync.op, str) and sync.op not in allowed:
        raise ShardError(
            f"{sync} in {mode} of a {original_class(module).__name__}: its gradients are whole or partial sums"
            if mode == "bwd_post"
            else f"{sync} in {mode} of a {original_class(module).__name__}: its inputs are not partial sums",
            fix=f"one of {', '.join(allowed)}",
        )
    _check_argument(module, sharding, mode, sync, own)
    if sync.axis is None and sync.op in ("all_gather", "reduce_scatter", "scatter"):
        raise ShardError(f"{sync.op} needs the axis to split", fix=f'sync("{mode}", "{sync.op}", axis=1)')
    sums = mode == "fwd_post" and sync.op in ("all_reduce", "reduce_scatter")
    if sums and not any(map(_gives_partial, module.modules())):
        raise ShardError(
            f"{original_class(module).__name__} is not a projection, and its output is not a partial sum",
            fix="sync the row-parallel Linear or Conv1D in it",
        )
    moves = sync.op == "scatter" or sync.reshards or sync.argument in own or mode == "bwd_post"
    if not moves and not any(sharding_of(child) for child in module.modules()):
        raise ShardError("nothing in it is sharded, so there is nothing to synchronize", fix="shard it first")


def _check_free(sharding: ModuleSharding | None, key: str, sync: Sync) -> None:
    """Raise if something is synchronized there already, unless it is a resharding that ``sync`` contains."""
    before = None if sharding is None else sharding.syncs.get(key)
    if before is not None and not (before.reshards and sync.reshards):
        raise ShardError(f"{key} has {before} already", fix="undo that sync first")


def _check_argument(
    module: nn.Module, sharding: ModuleSharding | None, mode: str, sync: Sync, own: Collection[str]
) -> None:
    """Raise for an argument missing from the module or without need of synchronization."""
    if sync.argument in own and (mode, sync.op) != ("bwd_post", "all_reduce"):
        raise ShardError(
            f"{sync.argument} is a parameter, of which only the gradient can be synchronized",
            fix=f'sync("bwd_post", "all_reduce", argument="{sync.argument}")',
        )
    if sync.argument in own and sharding is not None and sync.argument in sharding.splits:
        raise ShardError(f"{sync.argument} is sharded, so its gradient is whole", fix="leave it out")
    names = input_names(module)
    if sync.argument is not None and sync.argument not in own and (mode == "fwd_post" or sync.argument not in names):
        raise ShardError(f"it has no argument {sync.argument!r} to synchronize", fix=f"one of {', '.join(names)}")


def check_output_gradient(module: nn.Module, sharding: ModuleSharding | None, sync: Sync) -> None:
    """Raise if the gradients of an output are not partial sums to all-reduce.

    Raises:
        ShardError: gives the reason and the fix.
    """
    role = sharding.role(module) if sharding is not None else None
    if sync.op != "all_reduce" or sync.argument is not None or sync.axis is not None:
        raise ShardError("the gradient of an output is whole, or a partial sum", fix='sync("bwd_pre", "all_reduce")')
    if sharding is not None and "bwd_pre" in sharding.syncs:
        raise ShardError("bwd_pre has all_reduce already", fix="undo that sync first")
    if role in (COLUMN, CHANNEL):
        raise ShardError("each rank has the gradient of its own outputs", fix="leave it out")


def check_means(module: nn.Module, sharding: ModuleSharding | None, sync: Sync) -> None:
    """Raise if the means in the forward of ``module`` are not over sharded features, to be all-reduced.

    Raises:
        ShardError: gives the reason and the fix.
    """
    if sync.op != "all_reduce" or sync.argument is not None or sync.axis is not None:
        raise ShardError("means are averaged over the ranks", fix=f'sync("{MEANS}", "all_reduce")')
    if (
        sharding is None
        or sharding.role(module) != OWN
        or any(split.size % sharding.ranks for split in sharding.splits.values())
    ):
        raise ShardError(
            f"a {original_class(module).__name__} has no parameters in equal shards, and so its features are whole",
            fix="shard its weight first",
        )
    if MEANS in sharding.syncs:
        raise ShardError(f"{MEANS} has all_reduce already", fix="undo that sync first")


def check_sync(module: nn.Module, sharding: ModuleSharding | None, mode: str, sync: Sync) -> None:
    """Raise for a synchronization in conflict with the sharding of ``module``.

    Raises:
        ShardError: gives the reason and the fix.
    """
    check_names(mode, sync)
    role = sharding.role(module) if sharding else None
    _check_free(sharding, mode, sync)
    if sync.reshards and role is None:
        return
    if sharding is None or role is None:
        raise ShardError("its weight is not sharded, so there is nothing to synchronize", fix="shard it first")
    refused = _REFUSED.get((role, mode, sync.op)) if isinstance(sync.op, str) else None
    if role == CHANNEL and isinstance(sync.op, str):
        refused = ("it works on channels of its own, each whole on its rank", "sync the convolutions around it")
    if role == ROW and mode == "fwd_post" and sync.reshards:
        refused = ("a resharding moves partial sums and does not add them up", _REDUCE_INSTEAD)
    if sync.op == LEFT and ((role, mode) != (COLUMN, "fwd_post") or projection_of(module) is None):
        refused = ("only the outputs of a column-parallel projection can be left as a DTensor", "leave it out")
    if refused is not None:
        raise ShardError(f"{sync} in {mode} of a {role}-parallel module: {refused[0]}", fix=refused[1])
    _check_pair(sharding, mode, sync)
    _check_axis(sharding, mode, sync)


def _check_pair(sharding: ModuleSharding, mode: str, sync: Sync) -> None:
    """Raise if ``bwd_post`` would reduce the gradient of a gathered input a second time."""
    pair = {mode: sync.op} | {other: one.op for other, one in sharding.syncs.items()}
    if pair.get("fwd_pre") == "all_gather" and pair.get("bwd_post") == "all_reduce":
        raise ShardError(
            'the gradient of fwd_pre "all_gather" is reduced and scattered already; bwd_post would do it twice',
            fix="keep one: all_gather for an input that is sharded, all_reduce for one that is whole",
        )


def _check_axis(sharding: ModuleSharding, mode: str, sync: Sync) -> None:
    if mode == "fwd_post" and sync.op in ("all_gather", LEFT) and any(s.parts > 1 for s in sharding.splits.values()):
        raise ShardError("packed outputs side by side would be in another order", fix="gather after they are split")
    if sync.axis is None:
        if sync.op == "reduce_scatter" or (sync.op == "all_gather" and mode == "fwd_pre"):
            raise ShardError(f"{sync.op} needs the axis to split", fix=f'sync("{mode}", "{sync.op}", axis=1)')
        return
    if not isinstance(sync.axis, int) or isinstance(sync.axis, bool):
        raise ShardError(f"an axis is a number, not {sync.axis!r}")
    if sync.op in ("scatter", "all_gather", LEFT) and mode != "fwd_pre" and sync.axis != -1:
        raise ShardError("the outputs are sharded along the last axis", fix="axis=-1, or leave it out")
    if sync.op == "all_reduce":
        raise ShardError("an all_reduce has no axis", fix="leave it out")
    if sync.op == "scatter" and sync.axis != -1:
        raise ShardError("a row-parallel module has its inputs along the last axis", fix="axis=-1")


# -- what is missing ----------------------------------------------------------------------------------------


def missing_syncs(root: nn.Module) -> list[str]:
    """List the missing shards and synchronizations of the sharded modules of ``root``, one line per module.

    Without them the sharded modules do not compute the same results as the whole ones.
    """
    found = []
    for path, module in root.named_modules():
        sharding = sharding_of(module)
        if sharding is None or not sharding.splits:
            continue
        role, why = sharding.role(module), incomplete(module, sharding)
        if why:
            found.append(f"{path}: {why}")
        elif role == ROW and "fwd_post" not in sharding.syncs:
            found.append(f'{path}: nobody adds its partial sums up: .sync("fwd_post", "all_reduce")')
        elif role == COLUMN and not isinstance(module, nn.Embedding) and not _input_reduced(root, path, sharding):
            found.append(
                f"{path}: nobody adds the gradients of its input up: "
                '.sync("bwd_post", "all_reduce"), or on the module that calls it'
            )
    return found


def _input_reduced(root: nn.Module, path: str, sharding: ModuleSharding) -> bool:
    if sharding.syncs.keys() & {"bwd_post", "fwd_pre"}:
        return True
    parts = path.split(".")
    above = [root.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    beside = (sharding_of(module) for module in above[-1].modules())
    if any(one is not None and "bwd_pre" in one.syncs for one in beside):
        return True  # what gives its input takes its part, too
    found = ((sharding_of(module), module) for module in above)
    return any(one is not None and one.reduces_gradients(module) for one, module in found)
