"""``sync``: collectives of a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from schedule.core.edits import SetItem
from schedule.distributed.communication.resharding import Resharding
from schedule.distributed.tensor_parallel.callers import check_columns, shared_inputs
from schedule.distributed.tensor_parallel.conflicts import check_boundary, check_output_gradient, check_sync
from schedule.distributed.tensor_parallel.edits import ForgetRun
from schedule.distributed.tensor_parallel.modules import (
    COLUMN,
    OWN,
    SHARDING,
    ModuleSharding,
    Sync,
    is_torch_layer,
    projection_of,
    sharding_of,
    sync_key,
)
from schedule.distributed.tensor_parallel.state import sharded_state
from schedule.primitives.registry import primitive
from schedule.primitives.shard import reforward, refuse_inlined, refuse_rewritten
from schedule.util.errors import ShardError, TraceError

if TYPE_CHECKING:
    from schedule.core.node import Node
    from schedule.distributed.tensor_parallel.modules import ModuleSharding, Sync
    from schedule.distributed.tensor_parallel.state import Sharded


@primitive
def sync(
    sch: Node,
    mode: str,
    op_or_fn: str | Callable[[Tensor], Tensor],
    axis: int | None = None,
    argument: str | None = None,
) -> None:
    """Synchronize a module over the tensor-parallel ranks.

    ::

        before:  y = F.linear(x, self.weight.to_local()) + self.bias                  # a partial sum
        after:   y = reduce_from_tensor_parallel(F.linear(x, self.weight.to_local())) + self.bias

    ==========  ===================  ==============================================================
    mode        op                   meaning; gradient
    ==========  ===================  ==============================================================
    fwd_post    all_reduce           row-parallel: sum of the partial outputs, before the bias; unchanged
    fwd_post    reduce_scatter       row-parallel: this rank's part of that sum along ``axis``; all-gathered
    fwd_post    all_gather           column-parallel: concatenated outputs of all ranks; this rank's part
    fwd_post    dtensor              column-parallel: unchanged outputs, as a DTensor; unchanged
    bwd_post    all_reduce           column-parallel: unchanged input; all-reduced
    bwd_pre     all_reduce           any whole output read by sharded modules: unchanged; all-reduced
    fwd_pre     all_gather           column-parallel: gathers an input sharded along ``axis``; reduce-scattered
    fwd_pre     scatter              row-parallel: this rank's part of a whole input; all-gathered
    any         "RS->SR"             shards another dimension (R replicated, S sharded); resharded back
    ==========  ===================  ==============================================================

    A module that calls several column-parallel ones on one input (q, k and v; gate and up) can run their
    ``bwd_post`` ``all_reduce`` or ``fwd_pre`` ``all_gather`` for them: one collective instead of several. Any other
    module can be synchronized at one of its arguments, at its (first) output, and in the gradient of its own whole
    parameter used on different data by every rank: ``sync("bwd_post", "all_reduce", argument="weight")``.

    Args:
        sch: the module.
        mode: ``"fwd_pre"``, ``"fwd_post"``, ``"bwd_pre"`` or ``"bwd_post"``.
        op_or_fn: a collective by name; a resharding with one letter per dimension (``"RS->RR"`` all-gathers,
            ``"RR->SR"`` takes each rank's part, ``"RS->SR"`` is an all-to-all); or a function of the tensor, called
            in place of the collective (in ``bwd_post``, of the gradient of the input).
        axis: the dimension gathered by all_gather or split by reduce_scatter, such as 1 for the sequence.
        argument: for a module other than a projection, the name of the input or parameter. None means, in
            ``bwd_post``, the inputs shared by its column-parallel modules, else the first.

    Raises:
        ShardError: the module is not sharded, or the collective contradicts its sharding.
    """
    state, sharding = sharded_state(sch.tree), sharding_of(sch.module)
    wanted = _wanted(state, op_or_fn, axis, argument)
    if mode == "bwd_pre":
        _sync_output_gradient(sch, state, wanted)
    elif projection_of(sch.module) is not None and argument is None:
        _sync_projection(sch, state, mode, wanted)
    elif sharding is not None and sharding.splits and is_torch_layer(sch.module):
        _sync_layer(sch, state, mode, wanted)
    else:
        _sync_boundary(sch, state, mode, wanted)


def _wanted(state: Sharded, op: str | Callable[[Tensor], Tensor], axis: int | None, argument: str | None) -> Sync:
    if isinstance(op, str) and "->" in op:
        op = Resharding(op, state.tp.group)
    return Sync(op, axis, argument)


def _sync_projection(sch: Node, state: Sharded, mode: str, wanted: Sync) -> None:
    module, sharding = sch.module, sharding_of(sch.module)
    check_sync(module, sharding, mode, wanted)
    if sharding is None:
        return
    refuse_inlined(sch, state, changes_shapes=wanted.op != "all_reduce")
    refuse_rewritten(sch, module)
    caller = state.caller_of(sch.path)
    above = sharding_of(caller[0]) if caller is not None else None
    if caller is not None and above is not None and above.reduces_gradients(caller[0]) and mode != "fwd_post":
        raise ShardError("the module that calls it synchronizes its input already", fix="leave this out")
    _commit(sch, state, mode, wanted, sharding)


def _sync_layer(sch: Node, state: Sharded, mode: str, wanted: Sync) -> None:
    """Synchronize a convolution, an embedding or a batch norm."""
    sharding = sharding_of(sch.module)
    check_sync(sch.module, sharding, mode, wanted)
    if sharding is not None:
        refuse_inlined(sch, state, changes_shapes=wanted.op != "all_reduce")
        _commit(sch, state, mode, wanted, sharding)


def _sync_output_gradient(sch: Node, state: Sharded, wanted: Sync) -> None:
    sharding = sharding_of(sch.module)
    check_output_gradient(sch.module, sharding, wanted)
    if sch.tree.graphs.current(sch.module) and sharding is None:
        raise ShardError(f"{sch.label} was rewritten before", fix="shard and sync first, then fuse")
    refuse_inlined(sch, state, changes_shapes=False)
    _commit(sch, state, "bwd_pre", wanted, sharding or ModuleSharding(state.tp.group, state.tp.size))


def _sync_boundary(sch: Node, state: Sharded, mode: str, wanted: Sync) -> None:
    """Synchronize the inputs, the output or a whole parameter of a module other than a sharded layer."""
    module, sharding = sch.module, sharding_of(sch.module)
    check_boundary(module, sharding, mode, wanted)
    if wanted.argument is None and sharding is not None and any(key.startswith(f"{mode} ") for key in sharding.syncs):
        raise ShardError(f"{mode} has {wanted} already", fix="undo that sync first, or name another argument")
    if sch.tree.graphs.current(module):
        raise ShardError(f"{sch.label} was rewritten before", fix="shard and sync first, then fuse")
    refuse_inlined(sch, state, changes_shapes=wanted.op != "all_reduce")
    sharding = sharding or ModuleSharding(state.tp.group, state.tp.size)
    if (mode, wanted.op, wanted.argument) != ("bwd_post", "all_reduce", None) or sharding.role(module) == OWN:
        _commit(sch, state, mode, wanted, sharding)
        return
    check_columns(module)
    whole = state.whole_forward(module)
    if isinstance(whole, TraceError):
        raise ShardError(f"its inputs cannot be followed: {whole.why}", fix=whole.fix)

    def is_column(child: nn.Module) -> bool:
        own = sharding_of(child)
        return own is not None and own.role(child) == COLUMN

    for name in shared_inputs(module, whole, is_column):
        _commit(sch, state, mode, replace(wanted, argument=name), sharding_of(module) or sharding)


def _commit(sch: Node, state: Sharded, mode: str, wanted: Sync, sharding: ModuleSharding) -> None:
    module, after = sch.module, sharding.with_sync(mode, wanted)
    asked = f"{sch.path}.sync({sync_key(mode, wanted.argument)!r}, {wanted}, axis={wanted.axis})"
    sch.commit(
        [
            *state.tp.noted(asked),
            ForgetRun(sch.tree, [module]),
            SetItem(lambda: vars(module), SHARDING, after),
            reforward(sch, module, after, state),
        ]
    )
