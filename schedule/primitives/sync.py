"""The collectives of a sharded module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from schedule.edits import SetItem
from schedule.primitives.registry import primitive
from schedule.primitives.shard import Reforward, refuse_opened

if TYPE_CHECKING:
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

    Args:
        sch: the sharded module.
        mode: ``"fwd_pre"``, ``"fwd_post"`` or ``"bwd_post"``.
        op_or_fn: a collective by name; or a function of the tensor, put where the collective would be (in
            ``bwd_post``, of the gradient of the input).
        axis: the dimension that all_gather and reduce_scatter share out, such as 1 for the sequence.

    Raises:
        ShardError: the module is not sharded, or the collective contradicts how it is.
    """
    from schedule.distributed.conflicts import check_sync
    from schedule.distributed.edits import ForgetRun
    from schedule.distributed.modules import SHARDING, Sync, sharding_of
    from schedule.distributed.state import sharded_state

    module, wanted = sch.module, Sync(op_or_fn, axis)
    state, sharding = sharded_state(sch.tree), sharding_of(sch.module)
    check_sync(module, sharding, mode, wanted)
    if sharding is None:
        return
    refuse_opened(sch, state, changes_shapes=wanted.op != "all_reduce")
    after = sharding.with_sync(mode, wanted)
    sch.commit(
        [
            ForgetRun(sch.tree, [module]),
            SetItem(lambda: vars(module), SHARDING, after),
            Reforward(sch, module, after, state),
        ]
    )
