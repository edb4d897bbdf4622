"""``context_parallel``: a module on each rank's part of the sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from schedule.core.edits import SetItem
from schedule.distributed.communication.mesh import check_context
from schedule.distributed.planning.context_plans import context_of, parameters_below
from schedule.distributed.tensor_parallel.shard_edits import ForgetRun
from schedule.distributed.tensor_parallel.sharded_modules import SHARDING, projection_of
from schedule.distributed.tensor_parallel.state import fresh_sharding, sharded_state
from schedule.primitives.registry import primitive
from schedule.primitives.shard import reforward, refuse_inlined
from schedule.primitives.sync import sync
from schedule.util.errors import ShardError

if TYPE_CHECKING:
    from schedule.core.node import Node


@primitive
def context_parallel(sch: Node, argument: str | None = None) -> None:
    """Run a module, such as a layer, on each rank's part of the sequence.

    ::

        before:  y = scaled_dot_product_attention(q, k, v, mask)             # [batch, heads, seq, features]
        after:   k, v = all_gather(k), all_gather(v)                         # along the sequence, as one
                 y = scaled_dot_product_attention(q, k, v, own rows of mask)  # q, y: [batch, heads, seq / n, features]

    The module takes and returns hidden states ``[batch, seq / n, features]``: :meth:`sync` shards them before the
    first layer and gathers them after the last, as ``shard_plan(context=True)`` does. Its other inputs stay whole, and
    each rank takes its part of those along the sequence, such as rotary tables: so positions are the true ones. Of a
    mask it takes its own rows, so any mask is exact, with padding or without; for ``is_causal`` later keys are left
    out. Every rank has all parameters, and their gradients are all-reduced.

    By hand that is ``context_parallel()`` on every layer, such as those of ``sch["model.layers.*"]``, then
    ``sync("fwd_pre", "scatter", axis=1)`` on the first and ``sync("fwd_post", "RSR->RRR")`` on the last.

    Args:
        sch: the module.
        argument: the name of the input with the hidden states, by default its first.

    Raises:
        ShardError: no mesh, or none with a dimension ``"cp"``; a sequence that the ranks cannot share evenly; the
            module mixes positions other than by ``scaled_dot_product_attention`` of one sequence, has a cache of keys,
            or computes the mask itself; sharded or rewritten before.
    """
    check_context(sch.tree.mesh)
    run_on_parts(sch, argument)
    for path, name, _ in list(parameters_below(sch.path, sch.module)):
        sync(sch.root.at(path), "bwd_post", "all_reduce", argument=name)


def run_on_parts(sch: Node, argument: str | None) -> None:
    """Let a module run on parts of the sequence, without the sums of its parameters' gradients."""
    state, module = sharded_state(sch.tree), sch.module
    state.remember_whole(module)
    sharding = fresh_sharding(module, state.tp)
    if sharding.context is not None:
        raise ShardError("it runs on parts of the sequence already", fix="undo that step first")
    if projection_of(module) is not None:
        raise ShardError("a projection mixes no positions", fix="call it on the layer that has the attention")
    if any(sch.tree.graphs.current(inner) for inner in module.modules()):
        raise ShardError(f"{sch.label} was rewritten before", fix="context_parallel first, then fuse")
    refuse_inlined(sch, state, changes_shapes=True)
    context = context_of(module, argument, state)
    after = replace(sharding, context=context.inputs)
    sch.commit(
        [
            *state.tp.noted(f"{sch.path}.context_parallel({context})"),
            ForgetRun(sch.tree, [module]),
            SetItem(lambda: vars(module), SHARDING, after),
            reforward(sch, module, after, state),
        ]
    )
