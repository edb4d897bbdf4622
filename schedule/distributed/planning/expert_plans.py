"""Expert parallelism in a plan: experts spread over ranks, instead of a shard of every expert on each rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from schedule.capture import original_class
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.planning.plan_steps import EXPERTS, Group, ShardStep, SyncStep
from schedule.distributed.tensor_parallel.expert_proof import experts_of, has_experts
from schedule.distributed.tensor_parallel.experts import Experts
from schedule.distributed.tensor_parallel.parameters import check_untied
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.util.errors import ShardError


def with_expert_parallel(plan: Plan, root: nn.Module, state: Sharded, ranks: int) -> Plan:
    """Return ``plan`` with experts spread over ``ranks`` ranks wherever it is possible.

    The other experts stay as they are in ``plan``, and the reason is added to ``Plan.whole``. On one tensor-parallel
    rank nothing but experts is sharded.

    Args:
        plan: a tensor-parallel plan without sequence parallelism.
        root: the module at which paths begin.
        state: the tensor-parallel state with the recorded run.
        ranks: the number of ranks of the mesh's dimensions ``"ep"`` and ``"tp"`` together.
    """
    groups, whole = list(plan.groups) if plan.ranks > 1 else [], dict(plan.whole)
    for path, module in root.named_modules():
        if not has_experts(module) or not state.whole_calls.get(module):
            continue
        before = [group for group in groups if any(step.path == path for step in group.shards)]
        try:
            experts = experts_of(module, state.whole_calls[module], ranks)
            _check_apart(before, path)
            check_untied(root, module)
        except ShardError as error:
            whole[f"experts of {path}"] = error.why
            continue
        groups = [group for group in groups if group not in before]
        shards = [ShardStep(path, name, 0) for name, each in module._parameters.items() if each is not None]
        exchanges = list(_exchanges(path, module, experts, state, ranks))
        groups.append(Group(path, experts.count, shards, [], EXPERTS, exchanges))
        whole = {name: why for name, why in whole.items() if name not in {f"{path}.{step.name}" for step in shards}}
    return replace(plan, groups=groups, whole=whole)


def _check_apart(groups: list[Group], path: str) -> None:
    """Raise a :class:`ShardError` if one of the groups shards another module, too."""
    for other in (step.path for group in groups for step in group.shards if step.path != path):
        raise ShardError(f"{other} is sharded along with them")


def _exchanges(path: str, module: nn.Module, experts: Experts, state: Sharded, ranks: int) -> Iterator[SyncStep]:
    """Yield the collectives of one step: the numbers of tokens, the tokens, the results, and the gradients of both."""
    call = state.whole_calls[module][0]
    bound = inspect.signature(original_class(module).forward).bind(module, *call.args, **call.kwargs)
    tokens, index, weights = (bound.arguments[name] for name in experts.names)
    tp = state.tp.size
    pairs = tokens.nbytes * index.shape[1] // tp
    for mode, argument, size in (
        ("fwd_pre", experts.index, experts.count * index.dtype.itemsize),
        ("fwd_pre", experts.tokens, pairs),
        ("fwd_post", None, pairs),
        ("bwd_pre", None, pairs),
        ("bwd_post", experts.tokens, pairs),
    ):
        yield SyncStep(path, mode, "all_to_all", argument=argument, nbytes=size, ranks=ranks)
    if tp > 1:
        yield SyncStep(path, "fwd_post", "all_gather", 0, nbytes=tokens.nbytes)
        yield SyncStep(path, "bwd_post", "all_gather", 0, experts.tokens, tokens.nbytes)
        yield SyncStep(path, "bwd_post", "all_gather", 0, experts.weights, weights.nbytes)
