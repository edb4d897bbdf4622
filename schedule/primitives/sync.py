"""The collectives of a sharded module."""

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
from schedule.primitives.shard import reforward, refuse_opened, refuse_rewritten
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
    mode        op                   meaning; its gradient
    ==========  ===================  ==============================================================
    fwd_post    all_reduce           row-parallel: sum of the partial outputs, before the bias; as it is
    fwd_post    reduce_scatter       row-parallel: this rank's part of that sum along ``axis``; gathered
    fwd_post    all_gather           column-parallel: every rank's outputs side by side; this rank's part
    fwd_post    dtensor              column-parallel: the outputs as they are, in a DTensor; as it is
    bwd_post    all_reduce           column-parallel: the input as it is; its gradients are added up
    bwd_pre     all_reduce           any whole output, read by what is shared out: its gradients are added up
    fwd_pre     all_gather           column-parallel: an input shared out along ``axis``; reduced, scattered
    fwd_pre     scatter              row-parallel: this rank's part of a whole input; gathered
    any         "RS->SR"             another dimension shared out, R whole and S shared; the way back
    ==========  ===================  ==============================================================

    A module that calls several column-parallel ones on one input (q, k and v; gate and up) can take their
    ``bwd_post`` ``all_reduce`` or ``fwd_pre`` ``all_gather`` for them: one collective in place of several. Any other
    module can be synchronized at one of its arguments, at its (first) output, and in the gradient of a whole parameter
    of its own that every rank uses on other data: ``sync("bwd_post", "all_reduce", argument="weight")``.

    Args:
        sch: the module.
        mode: ``"fwd_pre"``, ``"fwd_post"``, ``"bwd_pre"`` or ``"bwd_post"``.
        op_or_fn: a collective by name; a resharding (``"RS->RR"``, gathers; ``"RR->SR"``, each its part; ``"RS->SR"``,
            all-to-all) with a letter for each dimension; or a function of the tensor, put where the collective
            would be (in ``bwd_post``, of the gradient of the input).
        axis: the dimension that all_gather and reduce_scatter share out, such as 1 for the sequence.
        argument: of a module that is no projection: the name of the input, or parameter. In ``bwd_post`` those that
            its column-parallel modules share, if None; else the first.

    Raises:
        ShardError: the module is not sharded, or the collective contradicts how it is.
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
    refuse_opened(sch, state, changes_shapes=wanted.op != "all_reduce")
    refuse_rewritten(sch, module)
    caller = state.caller_of(sch.path)
    above = sharding_of(caller[0]) if caller is not None else None
    if caller is not None and above is not None and above.reduces_gradients(caller[0]) and mode != "fwd_post":
        raise ShardError("the module that calls it synchronizes its input already", fix="leave this out")
    _commit(sch, state, mode, wanted, sharding)


def _sync_layer(sch: Node, state: Sharded, mode: str, wanted: Sync) -> None:
    """A convolution, an embedding, a batch norm."""
    sharding = sharding_of(sch.module)
    check_sync(sch.module, sharding, mode, wanted)
    if sharding is not None:
        refuse_opened(sch, state, changes_shapes=wanted.op != "all_reduce")
        _commit(sch, state, mode, wanted, sharding)


def _sync_output_gradient(sch: Node, state: Sharded, wanted: Sync) -> None:
    sharding = sharding_of(sch.module)
    check_output_gradient(sch.module, sharding, wanted)
    if sch.tree.graphs.current(sch.module) and sharding is None:
        raise ShardError(f"{sch.label} was rewritten before", fix="shard and sync first, then fuse")
    refuse_opened(sch, state, changes_shapes=False)
    _commit(sch, state, "bwd_pre", wanted, sharding or ModuleSharding(state.tp.group, state.tp.size))


def _sync_boundary(sch: Node, state: Sharded, mode: str, wanted: Sync) -> None:
    """The inputs, the output, or a whole parameter, of a module that is no sharded layer."""
    module, sharding = sch.module, sharding_of(sch.module)
    check_boundary(module, sharding, mode, wanted)
    if wanted.argument is None and sharding is not None and any(key.startswith(f"{mode} ") for key in sharding.syncs):
        raise ShardError(f"{mode} has {wanted} already", fix="undo that sync first, or name another argument")
    if sch.tree.graphs.current(module):
        raise ShardError(f"{sch.label} was rewritten before", fix="shard and sync first, then fuse")
    refuse_opened(sch, state, changes_shapes=wanted.op != "all_reduce")
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
