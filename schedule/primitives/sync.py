"""``sync``: collectives of a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from schedule.core.edits import SetItem
from schedule.distributed.communication.resharding import Resharding
from schedule.distributed.planning.layouts import check_neighbors
from schedule.distributed.tensor_parallel.callers import check_columns, shared_inputs
from schedule.distributed.tensor_parallel.conflicts import (
    check_boundary,
    check_means,
    check_names,
    check_output_gradient,
    check_sync,
)
from schedule.distributed.tensor_parallel.reshardings import check_layout, check_recorded, check_together, composed
from schedule.distributed.tensor_parallel.shard_edits import ForgetRun
from schedule.distributed.tensor_parallel.sharded_modules import (
    COLUMN,
    MEANS,
    OWN,
    SHARDING,
    ModuleSharding,
    Sync,
    is_torch_layer,
    projection_of,
    sharding_of,
    sync_key,
)
from schedule.distributed.tensor_parallel.state import fresh_sharding, sharded_state
from schedule.primitives.registry import primitive
from schedule.primitives.shard import reforward, refuse_inlined, refuse_rewritten
from schedule.util.errors import ShardError, TraceError

if TYPE_CHECKING:
    from schedule.core.node import Node
    from schedule.distributed.tensor_parallel.sharded_modules import ModuleSharding, Sync
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
    bwd_post    all_reduce           column-parallel: unchanged input, after fwd_pre; all-reduced
    bwd_pre     all_reduce           any whole output read by sharded modules: unchanged; all-reduced
    fwd_pre     all_gather           column-parallel: gathers an input sharded along ``axis``; reduce-scattered
    fwd_pre     scatter              row-parallel: this rank's part of a whole input; all-gathered
    fwd_mean    all_reduce           any module with a sharded weight: averages its means over the ranks; all-reduced
    fwd_pre     "RSR->RRR"           any module, its weights whole or not: reshards its input; resharded back
    fwd_post    "RRR->RSR"           any module: reshards its output; resharded back
    ==========  ===================  ==============================================================

    A resharding has one letter for each dimension: R for replicated, S for sharded. ``"RS->RR"`` all-gathers (its
    gradient is sliced), ``"RR->SR"`` takes each rank's part (all-gathered), ``"RS->SR"`` is an all-to-all. A second one
    on the same side starts from the layout that the first one left, and both run as one. Between two reshardings,
    modules work on a part of the tensor, and so the gradients of their whole parameters are partial sums.

    A module that calls several column-parallel ones on one input (q, k and v; gate and up) can run their
    ``bwd_post`` ``all_reduce`` or ``fwd_pre`` ``all_gather`` for them: one collective instead of several. Any other
    module can be synchronized at one of its arguments, at its (first) output, and in the gradient of its own whole
    parameter used on different data by every rank: ``sync("bwd_post", "all_reduce", argument="weight")``.

    Args:
        sch: the module.
        mode: ``"fwd_pre"``, ``"fwd_post"``, ``"bwd_pre"``, ``"bwd_post"``, or ``"fwd_mean"`` for a norm over sharded
            features.
        op_or_fn: a collective by name; a resharding; or a function of the tensor (in ``bwd_post``, of its gradient).
        axis: the dimension gathered by all_gather or split by reduce_scatter, such as 1 for the sequence.
        argument: name of an input or parameter of any module but a projection. None means, in ``bwd_post``, the inputs
            shared by its column-parallel modules, else the first.

    Raises:
        ShardError: the module is not sharded; the collective contradicts its sharding; or a resharding contradicts the
            recorded shapes, the modules next to it or another synchronization.
    """
    state = sharded_state(sch.tree)
    _install(sch, state, mode, _wanted(sch, state, mode, Sync(op_or_fn, axis, argument)))


def _install(sch: Node, state: Sharded, mode: str, wanted: Sync) -> None:
    sharding = sharding_of(sch.module)
    if mode == "bwd_pre":
        _sync_output_gradient(sch, state, wanted)
    elif mode == MEANS:
        check_means(sch.module, sharding, wanted)
        refuse_inlined(sch, state, changes_shapes=False)
        _commit(sch, state, mode, wanted, sharding or fresh_sharding(sch.module, state.tp))
    elif projection_of(sch.module) is not None and wanted.argument is None:
        _sync_projection(sch, state, mode, wanted)
    elif sharding is not None and sharding.splits and is_torch_layer(sch.module):
        _sync_layer(sch, state, mode, wanted)
    else:
        _sync_boundary(sch, state, mode, wanted)


def _wanted(sch: Node, state: Sharded, mode: str, asked: Sync) -> Sync:
    """Return the synchronization to install: a resharding in one with the one before it, checked against the shapes."""
    if isinstance(asked.op, str) and "->" in asked.op:
        asked = _resharding(sch, state, mode, asked, Resharding(asked.op, state.tp.group))
    sharding = sharding_of(sch.module)
    if sharding is not None and sharding.experts is not None:
        raise ShardError(
            "its experts are spread over the ranks, and its inputs and output are whole",
            fix="sync the module around it",
        )
    return asked


def _resharding(sch: Node, state: Sharded, mode: str, asked: Sync, op: Resharding) -> Sync:
    asked = replace(asked, op=op)
    check_names(mode, asked)
    state.remember_whole(sch.module)
    check_recorded(sch.module, state.whole_calls.get(sch.module, []), mode, asked, state.tp.size)
    return composed(sch.module, sharding_of(sch.module), mode, asked)


def _sync_projection(sch: Node, state: Sharded, mode: str, wanted: Sync) -> None:
    module, sharding = sch.module, sharding_of(sch.module)
    check_sync(module, sharding, mode, wanted)
    refuse_inlined(sch, state, changes_shapes=wanted.op != "all_reduce")
    refuse_rewritten(sch, module)
    caller = state.caller_of(sch.path)
    above = sharding_of(caller[0]) if caller is not None else None
    if caller is not None and above is not None and above.reduces_gradients(caller[0]) and mode != "fwd_post":
        raise ShardError("the module that calls it synchronizes its input already", fix="leave this out")
    _commit(sch, state, mode, wanted, sharding or ModuleSharding(state.tp.group, state.tp.size))


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
    if projection_of(module) is not None:
        refuse_rewritten(sch, module)
    elif sch.tree.graphs.current(module):
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
    check_layout(module, sharding, mode, wanted)
    check_together(module, after)
    if wanted.reshards:
        check_neighbors(state, module, after)
    asked = f"{sch.path}.sync({sync_key(mode, wanted.argument)!r}, {wanted}, axis={wanted.axis})"
    sch.commit(
        [
            *state.tp.noted(asked),
            ForgetRun(sch.tree, [module]),
            SetItem(lambda: vars(module), SHARDING, after),
            reforward(sch, module, after, state),
        ]
    )
