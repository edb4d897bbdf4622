"""``shard_experts``: expert parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from schedule.core.edits import SetItem
from schedule.distributed.communication.mesh import expert_parallel, expert_ranks
from schedule.distributed.tensor_parallel.expert_proof import experts_of
from schedule.distributed.tensor_parallel.parameters import ShardedTensor, check_untied
from schedule.distributed.tensor_parallel.shard_edits import ConvertOnLoad, ForgetRun, FreeWhole, ShardParameter
from schedule.distributed.tensor_parallel.sharded_modules import SHARDING, ModuleSharding, Split, sharding_of
from schedule.distributed.tensor_parallel.state import sharded_state
from schedule.primitives.registry import primitive
from schedule.primitives.shard import reforward, refuse_inlined, refuse_rewritten
from schedule.util.errors import ShardError

if TYPE_CHECKING:
    from schedule.core.history import Edit
    from schedule.core.node import Node


@primitive
def shard_experts(sch: Node) -> None:
    """Spread the experts of a mixture over the dimensions ``"ep"`` and ``"tp"`` of the mesh together.

    ::

        before:  y = self.experts(x, index, weights)         # x [tokens, hidden], local weight [experts, out, in]
        after:   rows = all_to_all(x[token of each pair])
                 pairs = all_to_all(self.experts(rows, expert of each row, 1))  # [experts / n, out, in]
                 y = (pairs * weights).sum(1)                # over the k experts of each token

    Along ``"ep"`` each rank has a batch of its own, as in data parallelism: a loss that is a mean over the batch is the
    mean of the ranks' losses, and the gradients of the experts are averaged over the ranks. The gradients of all other
    parameters are for data parallelism to average, such as ``fully_shard(model, mesh=mesh["ep"],
    ignored_params=experts)``. Along ``"tp"`` all ranks have the same tokens. Each sends its part of them, and the
    outputs are all-gathered.

    A module of experts is recognized by its call in the recorded run: it takes tokens, the indices of their experts and
    the weights of these, and all of its parameters begin with the dimension of the experts. It is run on random tokens
    to check that its output is the weighted sum of what each expert computes alone. The number of tokens for an expert
    may differ from call to call, and may be zero; no token is dropped.

    Args:
        sch: the module of the experts.

    Raises:
        ShardError: the mesh has no dimensions of these names; it is not a module of experts; their number is not
            divisible by the number of ranks; or it is sharded, tied or rewritten already.
    """
    state, module, mesh = sharded_state(sch.tree), sch.module, sch.tree.mesh
    size = expert_ranks(mesh)
    state.remember_whole(module)
    _refuse_changed(sch, module)
    found = experts_of(module, state.whole_calls.get(module, []), size)
    refuse_inlined(sch, state, changes_shapes=False)
    ranks = expert_parallel(mesh)
    experts = replace(found, replicas=state.tp.group, batches=size // state.tp.size)
    whole = {name: each for name, each in module._parameters.items() if each is not None}
    sharding = ModuleSharding(
        ranks.group, ranks.size, {name: Split(0, experts.count) for name in whole}, experts=experts
    )
    tensors = [ShardedTensor(each, [(module, name)], ranks, 0, 1) for name, each in whole.items()]
    edits: list[Edit] = [*ranks.noted(f"{sch.path}.shard_experts()"), ForgetRun(sch.tree, [module])]
    edits += [*map(ShardParameter, tensors), ConvertOnLoad(module)]
    edits += [SetItem(lambda: vars(module), SHARDING, sharding), reforward(sch, module, sharding, state)]
    sch.commit([*edits, *map(FreeWhole, tensors)])


def _refuse_changed(sch: Node, module: nn.Module) -> None:
    """Raise if the module or one of its parameters is sharded, tied or rewritten."""
    if sharding_of(module) is not None:
        raise ShardError("it is sharded or synchronized already", fix="undo that first")
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if hasattr(parameter, "placements"):
            raise ShardError(
                f"{name} is a DTensor already: {parameter.placements}", fix="shard first, then fully_shard"
            )
    check_untied(sch.tree.root, module)
    refuse_rewritten(sch, module)
