"""Checks of reshardings against the recorded shapes, the module's own sharding and its other synchronizations."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import nn

from schedule.capture import Call, TensorSpec, original_class
from schedule.distributed.communication.resharding import Resharding
from schedule.distributed.tensor_parallel.sharded_modules import (
    CHANNEL,
    COLUMN,
    CONVOLUTIONS,
    ROW,
    ModuleSharding,
    Sync,
    features_dim,
    input_names,
    projection_of,
    sync_key,
)
from schedule.util.errors import ShardError


def composed(module: nn.Module, sharding: ModuleSharding | None, mode: str, sync: Sync) -> Sync:
    """Return a resharding ``sync`` in one with the resharding that the same side of ``module`` has already.

    Raises:
        ShardError: the second does not start from the layout that the first one gives.
    """
    first = input_names(module)[:1] if mode == "fwd_pre" else []
    names = [None, *first] if sync.argument in (None, *first) else [sync.argument]
    syncs = {} if sharding is None else sharding.syncs
    name = next((name for name in names if sync_key(mode, name) in syncs), sync.argument)
    if projection_of(module) is not None and name in names:
        name = names[0]
    before, sync = syncs.get(sync_key(mode, name)), replace(sync, argument=name)
    if before is None or not isinstance(before.op, Resharding) or not isinstance(sync.op, Resharding):
        return sync
    return replace(sync, op=before.op.then(sync.op))


def check_recorded(module: nn.Module, calls: list[Call], mode: str, sync: Sync, ranks: int) -> None:
    """Raise if the tensor at this side of ``module`` cannot be resharded in a recorded call.

    Raises:
        ShardError: it has a different number of dimensions, or one does not divide evenly over the ranks.
    """
    for call in calls:
        spec = _output(call) if mode == "fwd_post" else _input(module, call, sync.argument)
        if isinstance(spec, TensorSpec) and isinstance(sync.op, Resharding):
            sync.op.check_whole(spec.shape, ranks)


def _input(module: nn.Module, call: Call, argument: str | None) -> Any:
    given = inspect.signature(original_class(module).forward).bind(module, *call.args, **call.kwargs).arguments
    return given.get(input_names(module)[0] if argument is None else argument)


def _output(call: Call) -> Any:
    """Return the first tensor in the result of a call, the main output of a module."""
    output = call.output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else [output]
    return next((each for each in values if isinstance(each, TensorSpec)), None)


def check_layout(module: nn.Module, sharding: ModuleSharding, mode: str, sync: Sync) -> None:
    """Raise if a resharding next to ``module`` contradicts the layout that the module takes or gives.

    Raises:
        ShardError: names both layouts.
    """
    op = sync.op
    if not isinstance(op, Resharding):
        return
    role, cls = sharding.role(module), original_class(module).__name__
    own = op.after if mode == "fwd_pre" else op.before
    features = op.dims + features_dim(module)
    whole, part = "R" * op.dims, "".join("S" if dim == features else "R" for dim in range(op.dims))
    verb = "takes" if mode == "fwd_pre" else "gives"
    if role is None:
        layer = projection_of(module) is not None or original_class(module) in CONVOLUTIONS
        if layer and own == part:
            raise ShardError(
                f"{op.notation} in {mode}: the weight is whole, so the {cls} {verb} whole features, not {own}",
                fix=f"shard another dimension, or shard the weight first: it {verb} {whole} now",
            )
        return
    taken = {COLUMN: whole, ROW: whole if isinstance(module, nn.Embedding) else part, CHANNEL: part}
    expected = taken.get(role) if mode == "fwd_pre" else {COLUMN: part, CHANNEL: part}.get(role)
    if expected is not None and own != expected:
        at = f'"…->{expected}"' if mode == "fwd_pre" else f'"{expected}->…"'
        raise ShardError(
            f"{op.notation} in {mode}: a {role}-parallel {cls} {verb} {expected}, not {own}", fix=f"a resharding {at}"
        )


def check_together(module: nn.Module, sharding: ModuleSharding) -> None:
    """Raise if the gradient of a tensor that a resharding shards would be all-reduced.

    Raises:
        ShardError: names both synchronizations.
    """
    for key, sync in sharding.syncs.items():
        mode, _, name = key.partition(" ")
        if not isinstance(sync.op, Resharding) or sync.op.target < 0:
            continue
        for other, reduced in sharding.syncs.items():
            if reduced.op == "all_reduce" and _same_tensor(module, (mode, name), other.partition(" ")[::2]):
                raise ShardError(
                    f"after {key} {sync} each rank has the gradient of its own part: {other} all_reduce mixes them",
                    fix=f"leave {other} out, or reshard to {'R' * sync.op.dims}",
                )


def _same_tensor(module: nn.Module, forward: tuple[str, str], backward: tuple[str, str]) -> bool:
    """Return whether two synchronizations, by mode and argument, are of one tensor and of its gradient."""
    if forward[0] == "fwd_post":
        return backward[0] == "bwd_pre"
    first = input_names(module)[0]
    return backward[0] == "bwd_post" and (forward[1] or first) == (backward[1] or first)
