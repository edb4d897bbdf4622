"""The collectives of a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from schedule.edits import SetItem
from schedule.errors import ShardError, TraceError
from schedule.primitives.registry import primitive
from schedule.primitives.shard import Reforward, refuse_opened, refuse_rewritten
from schedule.tracing.specialisation import original_class

if TYPE_CHECKING:
    from schedule.distributed.modules import Sync
    from schedule.distributed.state import Sharded
    from schedule.tree import Schedule


@primitive
def sync(sch: Schedule, mode: str, op_or_fn: str | Callable[[Tensor], Tensor], axis: int | None = None) -> None:
    """Synchronise a sharded module over the tensor-parallel ranks.

    ::

        before:  y = F.linear(x, self.weight.to_local()) + self.bias                  # a partial sum
        after:   y = reduce_from_tensor_parallel(F.linear(x, self.weight.to_local())) + self.bias

    ==========  ===================  ==============================================================
    mode        op                   meaning; its gradient
    ==========  ===================  ==============================================================
    fwd_post    all_reduce           row-parallel: sum of the partial outputs, before the bias; as it is
    fwd_post    reduce_scatter       row-parallel: this rank's part of that sum along ``axis``; gathered
    fwd_post    all_gather           column-parallel: every rank's outputs side by side; this rank's part
    bwd_post    all_reduce           column-parallel: the input as it is; its gradients are added up
    fwd_pre     all_gather           column-parallel: an input shared out along ``axis``; reduced, scattered
    fwd_pre     scatter              row-parallel: this rank's part of a whole input; gathered
    ==========  ===================  ==============================================================

    A module that calls several column-parallel ones on one input (q, k and v; gate and up) can take their
    ``bwd_post`` ``all_reduce`` for them: one reduction in place of several.

    Args:
        sch: the sharded module.
        mode: ``"fwd_pre"``, ``"fwd_post"`` or ``"bwd_post"``.
        op_or_fn: a collective by name; or a function of the tensor, put where the collective would be (in
            ``bwd_post``, of the gradient of the input).
        axis: the dimension that all_gather and reduce_scatter share out, such as 1 for the sequence.

    Raises:
        ShardError: the module is not sharded, or the collective contradicts how it is.
    """
    from schedule.distributed.modules import Sync, projection_of
    from schedule.distributed.state import sharded_state

    state, wanted = sharded_state(sch.tree), Sync(op_or_fn, axis)
    if projection_of(sch.module) is None:
        _sync_caller(sch, state, mode, wanted)
    else:
        _sync_projection(sch, state, mode, wanted)


def _sync_projection(sch: Schedule, state: Sharded, mode: str, wanted: Sync) -> None:
    from schedule.distributed.conflicts import check_sync
    from schedule.distributed.edits import ForgetRun
    from schedule.distributed.modules import SHARDING, sharding_of

    module, sharding = sch.module, sharding_of(sch.module)
    check_sync(module, sharding, mode, wanted)
    if sharding is None:
        return
    refuse_opened(sch, state, changes_shapes=wanted.op != "all_reduce")
    refuse_rewritten(sch, module)
    caller = state.caller_of(sch.path)
    above = sharding_of(caller[0]) if caller is not None else None
    if above is not None and mode != "fwd_post":
        raise ShardError("the module that calls it synchronises its input already", fix="leave this out")
    after = sharding.with_sync(mode, wanted)
    sch.commit(
        [
            ForgetRun(sch.tree, [module]),
            SetItem(lambda: vars(module), SHARDING, after),
            Reforward(sch, module, after, state),
        ]
    )


def _sync_caller(sch: Schedule, state: Sharded, mode: str, wanted: Sync) -> None:
    """The copy for several column-parallel children of one input."""
    from schedule.distributed.callers import CopiedInputs, WrapForward, check_columns, shared_inputs
    from schedule.distributed.edits import ForgetRun
    from schedule.distributed.modules import SHARDING, ModuleSharding, sharding_of

    module, cls = sch.module, original_class(sch.module)
    if (mode, wanted.op, wanted.axis) != ("bwd_post", "all_reduce", None):
        raise ShardError(
            f"{cls.__name__} is no projection: all it can synchronise is the gradient of an input that its "
            "column-parallel modules share",
            fix='sync("bwd_post", "all_reduce"), or sync the Linear or Conv1D in it',
        )
    if sharding_of(module) is not None:
        raise ShardError("bwd_post has all_reduce already", fix="undo that sync first")
    if sch.tree.graphs.current(module):
        raise ShardError(f"{sch.label} was rewritten before", fix="shard and sync first, then fuse")
    refuse_opened(sch, state, changes_shapes=False)
    check_columns(module)
    whole = state.whole_forward(module)
    if isinstance(whole, TraceError):
        raise ShardError(f"its inputs cannot be followed: {whole.why}", fix=whole.fix)
    names = shared_inputs(module, whole)
    sharding = ModuleSharding(state.tp.group, state.tp.size, syncs={mode: wanted})
    sch.commit(
        [
            ForgetRun(sch.tree, [module]),
            SetItem(lambda: vars(module), SHARDING, sharding),
            WrapForward(module, CopiedInputs(cls, names, state.tp.group), sch.path),
        ]
    )
