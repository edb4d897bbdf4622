"""``shard_plan`` and ``apply_plan``: automatic tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedule.capture import Specialization, specialize
from schedule.distributed.communication.mesh import (
    TensorParallel,
    check_context,
    checked_mesh,
    expert_ranks,
    has_expert_dimension,
    tensor_parallel,
)
from schedule.distributed.planning.context_plans import find_contexts
from schedule.distributed.planning.expert_plans import with_expert_parallel
from schedule.distributed.planning.plan_data import with_parallel_loss
from schedule.distributed.planning.plan_steps import EXPERTS
from schedule.distributed.planning.planner import find_plan
from schedule.distributed.planning.sequence import with_sequence_parallel
from schedule.distributed.tensor_parallel.sharded_modules import ATTENTION, LEFT, stays_call
from schedule.distributed.tensor_parallel.state import Sharded, sharded_state
from schedule.primitives.context_parallel import run_on_parts
from schedule.primitives.registry import primitive, query
from schedule.primitives.shard import shard
from schedule.primitives.shard_experts import shard_experts
from schedule.primitives.sync import sync
from schedule.runtime.scheduled import forward_of, state_of
from schedule.util.errors import NotApplicable, ShardError, TraceError
from schedule.util.printing import in_progress

if TYPE_CHECKING:
    from torch import nn

    from schedule.core.node import Node
    from schedule.distributed.communication.mesh import TensorParallel
    from schedule.distributed.planning.plan_data import Plan


@query
def shard_plan(
    sch: Node,
    mesh: Any = None,
    vocabulary: bool = True,
    sequence: bool = False,
    parallel_loss: bool = False,
    experts: bool | None = None,
    context: bool | None = False,
) -> Plan:
    """Find a tensor-parallel plan for this model from its traced graph alone.

    ::

        plan = sch.shard_plan(mesh)
        print(plan)             # which layers are column- and row-parallel, the collectives, the bytes they move
        sch.apply_plan(plan.without("lm_head"))

    Attention is sharded by heads and an MLP by its width wherever no operation in the graph prevents it. The plan
    depends on the graph, not on known architectures or names. The model does not change.

    Args:
        sch: the schedule of the whole model.
        mesh: a ``DeviceMesh``, by default the schedule's own; or only a number of ranks.
        vocabulary: shard embeddings by rows, and projections onto the vocabulary, whose outputs are gathered.
        sequence: between the sharded groups, give each rank its part of the sequence, if the layers allow it. The
            sequence lengths must then be divisible by the number of ranks.
        parallel_loss: keep the logits as a DTensor ``[batch, seq, vocab]`` sharded over the vocabulary instead of
            gathering them. Run the model and the backward pass within
            ``torch.distributed.tensor.parallel.loss_parallel()``, whose cross entropy communicates a few numbers per
            token; :func:`fused.cross_entropy` takes such logits directly.
        experts: spread the experts of a mixture over the dimensions ``"ep"`` and ``"tp"`` of the mesh, as
            :meth:`shard_experts` does, instead of sharding the width of each. By default if the mesh has a dimension
            ``"ep"``. Experts whose number is not divisible by the ranks keep their shards of the width.
        context: share the sequence instead of heads and features, from the first layer to the last
            (:meth:`context_parallel`). None takes the plan that moves fewer bytes, which context parallelism does for
            sequences that are long next to the width of the model.

    Raises:
        ShardError: no mesh, or another than the schedule's; ``parallel_loss`` without sharded logits; ``experts``
            on a mesh without these dimensions; ``context`` with a mesh without a dimension ``"cp"``, or no chain of
            layers can work on parts of the sequence.
        TraceError: the model cannot be traced.
        NotApplicable: the model is sharded or rewritten already.
    """
    _refuse_inner(sch)
    _refuse_touched(sch)
    with in_progress(None, "finding a plan"):
        return _found_plan(sch, mesh, vocabulary, sequence, parallel_loss, experts, context)


def _found_plan(
    sch: Node,
    mesh: Any,
    vocabulary: bool,
    sequence: bool,
    parallel_loss: bool,
    experts: bool | None,
    context: bool | None,
) -> Plan:
    state = Sharded(sch.tree, _ranks(sch, mesh))
    spread = _expert_ranks(sch, mesh, experts)
    state.whole = sch.tree.graphs.recording
    shared = None if context is False else _shared_sequence(sch, state, sequence, parallel_loss)
    if shared is not None and context:
        return shared if shared.groups else _refuse_contexts(shared)
    graph = _flattened(sch).graph
    plan = find_plan(graph, sch.module, state, vocabulary, averages=not (sequence or parallel_loss))
    if spread is not None:
        plan = with_expert_parallel(plan, sch.module, state, spread)
    if sequence:
        plan = with_sequence_parallel(plan, graph, sch.module, state)
    plan = with_parallel_loss(plan) if parallel_loss else plan
    if shared is not None and shared.groups and shared.bytes_moved() < plan.bytes_moved():
        return shared
    return plan


def _shared_sequence(sch: Node, state: Sharded, sequence: bool, parallel_loss: bool) -> Plan:
    check_context(sch.tree.mesh)
    if sequence or parallel_loss:
        option = "sequence" if sequence else "parallel_loss"
        raise ShardError(f"{option} is for heads and features", fix=f"leave out {option}, or context")
    return find_contexts(sch.module, state)


def _refuse_contexts(found: Plan) -> Plan:
    raise ShardError(
        "; ".join(f"{where}: {why}" for where, why in found.whole.items()) or "no layers hand hidden states on",
        fix="shard heads and features instead: shard_plan(mesh)",
    )


@primitive
def apply_plan(sch: Node, plan: Plan) -> None:
    """Shard and synchronize the model according to ``plan``, or change nothing on error.

    Args:
        sch: the schedule of the whole model, with a mesh.
        plan: from :meth:`shard_plan`, edited or not.

    Raises:
        ShardError: the plan is for another number of ranks, or one of its steps cannot be made.
    """
    _refuse_inner(sch)
    size = sharded_state(sch.tree).tp.size
    if plan.ranks != size:
        raise ShardError(f"the plan is for {plan.ranks} ranks and the mesh has {size}", fix="make a plan for this mesh")
    _apply(sch, plan)


def _apply(sch: Node, plan: Plan) -> None:
    """Apply the shards and syncs of ``plan``."""
    state = sharded_state(sch.tree)
    whole = [("fwd_post", "all_gather"), ("fwd_post", LEFT)]
    state.gathered = frozenset(step.path for step in plan.syncs if (step.mode, step.op) in whole)
    for group in plan.groups:
        if group.kind == EXPERTS:
            shard_experts(sch.at(group.name))
            continue
        for step in group.shards:
            shard(sch.at(step.path), step.name, step.axis, step.parts, step.replicas, step.common)
    for path, argument in dict.fromkeys((step.path, step.argument) for step in plan.syncs if step.mode == ATTENTION):
        check_context(sch.tree.mesh)
        run_on_parts(sch.at(path), argument)
    for each in (step for step in plan.syncs if step.mode != ATTENTION):
        sync(sch.at(each.path), each.mode, each.op, each.axis, each.argument)


def _refuse_touched(sch: Node) -> None:
    touched = [module for module in sch.module.modules() if state_of(module) is not None]
    if touched:
        raise NotApplicable(
            f"{sch.tree.path_of(touched[0]) or 'the root'} was sharded or rewritten already",
            fix="make the plan first; undo(), if need be",
        )


def _refuse_inner(sch: Node) -> None:
    if sch.path:
        raise NotApplicable("a plan is for a whole model", fix="use the root schedule")


def _ranks(sch: Node, mesh: Any) -> TensorParallel:
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        if mesh < 1:
            raise ShardError(f"{mesh} ranks cannot share anything", fix="shard_plan(2), say, or a mesh")
        return TensorParallel(None, "", mesh, 0)
    if mesh is not None and sch.tree.mesh is None:
        sch.tree.mesh = checked_mesh(mesh)
    if mesh is not None and mesh != sch.tree.mesh:
        raise ShardError(f"the schedule's mesh is {sch.tree.mesh}, and this is {mesh}", fix="use one mesh")
    return tensor_parallel(sch.tree.mesh)


def _expert_ranks(sch: Node, mesh: Any, experts: bool | None) -> int | None:
    """Return the number of ranks over which experts are spread, or None if they are not."""
    if isinstance(mesh, int):
        return mesh if experts else None
    wanted = has_expert_dimension(sch.tree.mesh) if experts is None else experts
    return expert_ranks(sch.tree.mesh) if wanted else None


def _flattened(sch: Node) -> Specialization:
    """Trace the root in training mode, or else in eval mode, with everything but basic layers inlined.

    If that fails, submodules that cannot be traced stay calls.
    """
    graphs, module = sch.tree.graphs, sch.module
    call = graphs.calls(module)[0]

    opaque: set[nn.Module] = set()

    def enter(child: nn.Module, path: str) -> bool:
        return not stays_call(child) and child not in opaque

    def traced() -> Specialization:
        try:
            return specialize(module, forward_of(module), call, graphs.recording, True, enter)
        except TraceError:
            return specialize(module, forward_of(module), call, graphs.recording, False, enter)

    try:
        return traced()
    except TraceError:
        inner = [child for child in module.modules() if child is not module and not stays_call(child)]
        opaque.update(graphs.ensure(child for child in inner if graphs.calls(child)))
        if not opaque:
            raise
        return traced()
