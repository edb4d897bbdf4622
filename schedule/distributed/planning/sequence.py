"""Sequence parallelism: each rank has its part of the sequence between the groups of a plan.

The hidden states of a chain of layers are sharded along the sequence before the first layer and gathered after the last
one. In between, the all-reduce after a row-parallel layer becomes a reduce-scatter, and the copy before a
column-parallel layer becomes an all-gather. Norms, residual additions and dropout work on shards. The graph of a layer
determines whether it allows sequence parallelism.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx, nn

from schedule.capture import Specialization, specialize
from schedule.distributed.planning.chains import Link, chains_of
from schedule.distributed.planning.factored_values import Layer, Propagated
from schedule.distributed.planning.factors import Factor, factors
from schedule.distributed.planning.gradients import differentiable, parameters_of, users_of
from schedule.distributed.planning.owned import call_on_one_rank, holds, spec_on_one_rank
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.planning.plan_steps import Group, SyncStep
from schedule.distributed.planning.propagation import propagate
from schedule.distributed.planning.rehearsal import rehearse
from schedule.distributed.planning.units import (
    NotSequential,
    Unit,
    summed_outside,
    units_of,
    whole_units,
    without_units,
)
from schedule.distributed.tensor_parallel.callers import shared_inputs
from schedule.distributed.tensor_parallel.sharded_modules import projection_of, stays_call
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.runtime.scheduled import forward_of
from schedule.util.errors import ShardError, TraceError


def with_sequence_parallel(plan: Plan, graph: fx.Graph, root: nn.Module, state: Sharded) -> Plan:
    """Return ``plan`` with sequence parallelism in every chain of layers suitable for it.

    The others are unchanged, and the reason is added to ``Plan.whole``.

    Args:
        plan: a plan without sequence parallelism.
        graph: the flattened graph from which the plan was made.
        root: the module at which paths begin.
        state: the tensor-parallel state with the recorded run.
    """
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    calls = Counter(path for path in called if any(True for _ in root.get_submodule(path).parameters()))
    repeated = {path for path, count in calls.items() if count > 1}
    groups, boundaries, whole = list(plan.groups), list(plan.boundaries), dict(plan.whole)
    covered: set[str] = set()
    for chain in chains_of([step.path for step in plan.shards], root, state):
        if any(link.path.startswith(f"{done}.") for link in chain for done in covered):
            continue
        try:
            changed = [_layer(link, groups, root, state, repeated) for link in chain]
        except NotSequential as why:
            whole[f"sequence of {chain[0].path}"] = str(why)
            continue
        covered |= {link.path for link in chain}
        groups = [_replaced(group, changed) for group in groups]
        boundaries += [step for _, steps in changed for step in steps]
        first, last = chain[0], chain[-1]
        boundaries.append(SyncStep(first.path, "fwd_pre", "scatter", 1, first.argument, first.nbytes))
        boundaries.append(SyncStep(last.path, "fwd_post", "RSR->RRR", nbytes=last.nbytes))
    return Plan(plan.ranks, groups, whole, boundaries)


def _replaced(group: Group, changed: list[tuple[dict[SyncStep, SyncStep], list[SyncStep]]]) -> Group:
    steps = {old: new for replaced, _ in changed for old, new in replaced.items()}
    return replace(group, syncs=[steps.get(step, step) for step in group.syncs])


# -- one layer ----------------------------------------------------------------------------------------------


def _layer(
    link: Link, groups: list[Group], root: nn.Module, state: Sharded, repeated: set[str]
) -> tuple[dict[SyncStep, SyncStep], list[SyncStep]]:
    """Return the replaced sync steps and the additional sync steps of one layer.

    The additional ones gather the sequence for units and all-reduce the gradients of replicated parameters.

    Raises:
        NotSequential: the layer cannot work on a part of the sequence.
    """
    module, below = root.get_submodule(link.path), f"{link.path}."
    inner = [_inside(group, below) for group in groups if any(step.path.startswith(below) for step in group.shards)]
    units = units_of(link.path, link.length, inner, root, state)
    units |= {
        one.path: one for one in whole_units(link.path, link.length, inner, root, state) if _mixes(one, root, state)
    }
    summed = dict(summed_outside(units, inner, root, state))
    inner = [without_units(group, units) for group in inner]
    projections = {step.path for group in inner for step in group.shards if _is_projection(root, step.path)}
    if any(path.startswith(below) for path in repeated):
        raise NotSequential("it is called more than once")
    alone = {path.removeprefix(below) for path in (*projections, *units)}
    _, found, stream = _propagated(link, module, alone, state)
    factor = _sequence_factor(found, stream, state.tp.size)
    users, moving = users_of(found), differentiable(found, module, {stream})
    layers = {layer.path: layer for layer in found.layers}
    replaced = dict(_replacements(inner, link, root, state, found, layers, factor))
    gathering = {new.path for new in replaced.values() if (new.mode, new.op) == ("fwd_pre", "all_gather")}
    if link.path not in gathering:
        _rehearse(link, module, alone | {path.removeprefix(below) for path in gathering}, state)
    scattered = {step.path for step in summed.values()}
    partial = dict.fromkeys(_neighbors(units.values(), scattered, below, layers, factor, found))
    apart = {layers[path].node for path in alone if path in layers}
    for path in _replicated_parameters(found, users, moving, apart, factor):
        owner, _, name = f"{below}{path}".rpartition(".")
        if owner not in projections:
            size = _nbytes(module, path)
            partial[SyncStep(owner, "bwd_post", "all_reduce", argument=name, nbytes=size)] = None
    return {**replaced, **summed}, list(partial)


def _replicated_parameters(
    found: Propagated, users: Any, moving: Any, apart: Collection[OpNode], factor: Factor
) -> Iterator[str]:
    """Yield the replicated parameters in operations on a part of the sequence.

    Raises:
        NotSequential: a replicated operand is not computed from parameters alone.
    """
    for node in found.nodes:
        if node in apart or node.op == "output" or not holds(found, node, factor):
            continue
        for operand in operands(node.args):
            if holds(found, operand, factor) or operand not in moving:
                continue
            paths = parameters_of(found, users, moving, operand, factor)
            if paths is None:
                raise NotSequential(f"{node.name} takes {operand.name}, which is whole")
            yield from paths


def _mixes(unit: Unit, root: nn.Module, state: Sharded) -> bool:
    """Check whether a module mixes positions of the sequence, such as an unsharded attention."""
    try:
        _, found, given = _propagated(Link(unit.path, unit.argument, 0, 0), root.get_submodule(unit.path), set(), state)
        _sequence_factor(found, given, 1)
    except NotSequential:
        return True
    return False


def _neighbors(
    units: Iterable[Unit],
    scattered: Collection[str],
    below: str,
    layers: dict[str, Layer],
    factor: Factor,
    found: Propagated,
) -> Iterator[SyncStep]:
    """Yield the steps to gather the sequence before each unit and to shard its output again.

    The output of a unit in ``scattered`` is already reduce-scattered.

    Raises:
        NotSequential: the sequence is not dimension 1 of the only sharded input and of the output.
    """
    for unit in units:
        layer = layers[unit.path.removeprefix(below)]
        shared = [one for one in operands(layer.node.args) if holds(found, one, factor)]
        if shared != [layer.given] or [_axis(found, each, factor) for each in (*shared, layer.node)] != [1, 1]:
            raise NotSequential(f"what {unit.path} takes and gives does not stay apart along the sequence")
        yield SyncStep(unit.path, "fwd_pre", "RSR->RRR", argument=unit.argument, nbytes=unit.nbytes)
        if unit.path not in scattered:
            yield SyncStep(unit.path, "fwd_post", "RRR->RSR", nbytes=unit.nbytes)


def _inside(group: Group, below: str) -> Group:
    """Return the part of a group below one layer."""
    shards = [step for step in group.shards if step.path.startswith(below)]
    return replace(group, shards=shards, syncs=[step for step in group.syncs if step.path.startswith(below)])


def _is_projection(root: nn.Module, path: str) -> bool:
    return projection_of(root.get_submodule(path)) is not None


def _nbytes(module: nn.Module, path: str) -> int:
    owner, _, name = path.rpartition(".")
    parameter = module.get_submodule(owner)._parameters[name]
    return 0 if parameter is None else parameter.numel() * parameter.element_size()


def _inlined(apart: set[str]) -> Callable[[nn.Module, str], bool]:
    return lambda child, path: not stays_call(child) and path not in apart


def _propagated(
    link: Link, module: nn.Module, apart: set[str], state: Sharded
) -> tuple[Specialization, Propagated, OpNode]:
    recording = state.whole
    if recording is None or not recording.calls.get(module):
        raise NotSequential("it was not called in the recorded run")
    call = recording.calls[module][0]
    try:
        made = specialize(module, forward_of(module), call, recording, False, _inlined(apart))
    except TraceError as error:
        raise NotSequential(error.why) from error
    inputs = {name for name, text in made.signature.inputs.items() if text == link.argument}
    found = propagate(made.graph, module, apart, inputs, returned=True)
    for node in found.nodes:
        if node.op == "placeholder" and str(node.target) in inputs:
            return made, found, node
    raise NotSequential(f"its argument {link.argument} is not in its graph")


def _rehearse(link: Link, module: nn.Module, apart: set[str], state: Sharded) -> None:
    """Trace the layer again on a part of the sequence.

    Modules in ``apart`` gather the sequence, or scatter it, and are not followed.

    Raises:
        NotSequential: a rank would compute something else.
    """
    made, found, stream = _propagated(link, module, apart, state)
    ranks = state.tp.size
    factor, outputs = _sequence_factor(found, stream, ranks), {}
    for node in found.nodes:
        if node.op == "get_attr" and holds(found, node, factor):
            raise NotSequential(f"{node.target} is read along the sequence")
        if node.fx is not None and node.fx.op == "call_module" and str(node.fx.target) in apart:
            outputs[module.get_submodule(str(node.fx.target))] = spec_on_one_rank(found, node, factor, ranks)
    own = call_on_one_rank(module, made, found, factor, ranks)
    try:
        rehearse(module, made, state.recording, (), {}, ranks, own, _inlined(apart), outputs)
    except ShardError as error:
        raise NotSequential(error.why) from error


def _sequence_factor(found: Propagated, stream: OpNode, ranks: int) -> Factor:
    dims = found.dims[stream]
    own = factors(dims[1])
    if len(own) != 1 or own[0].blocked:
        raise NotSequential(f"its sequence: {own[0].blocked if own else 'one token'}")
    if own[0].size % ranks:
        raise NotSequential(f"its sequence of {own[0].size} cannot be shared evenly by {ranks} ranks")
    return own[0]


def _replacements(
    inner: list[Group],
    link: Link,
    root: nn.Module,
    state: Sharded,
    found: Propagated,
    layers: dict[str, Layer],
    factor: Factor,
) -> Iterator[tuple[SyncStep, SyncStep]]:
    below = f"{link.path}."
    for group in inner:
        for step in group.syncs:
            own = step.path.removeprefix(below)
            if (step.mode, step.op) == ("fwd_post", "all_reduce"):
                axis = _axis(found, layers[own].node, factor)
                if axis is None:
                    raise NotSequential(f"what {own} gives does not stay apart along the sequence")
                yield step, replace(step, op="reduce_scatter", axis=axis)
            elif step.mode == "bwd_pre":
                raise NotSequential(f"what {own} gives has a partial gradient, and would be a part of the sequence")
            elif step.mode == "bwd_post" and step.argument is None:
                yield step, _gathered(step, own, [own], root, state, found, layers, factor)
            elif step.mode == "bwd_post" and step.argument not in root.get_submodule(step.path)._parameters:
                names = _shared(step.path, group, root, state)
                paths = [f"{step.path}.{one}".removeprefix(below) for one in names.get(str(step.argument), [])]
                yield step, _gathered(step, own, paths, root, state, found, layers, factor)


def _gathered(
    step: SyncStep,
    own: str,
    columns: list[str],
    root: nn.Module,
    state: Sharded,
    found: Propagated,
    layers: dict[str, Layer],
    factor: Factor,
) -> SyncStep:
    """Return an all-gather in place of ``step`` if the inputs of the column-parallel layers are sharded."""
    axes = {_axis(found, layers[path].given, factor) for path in columns}
    if len(axes) != 1:
        raise NotSequential(f"{own} reads whole and shared values together")
    (axis,) = axes
    if axis is None:
        return step
    if step.argument is None:
        caller = state.caller_of(step.path)
        if caller is not None:
            path = state.tree.path_of(caller[0])
            names = _shared_of(caller[0], {root.get_submodule(step.path)}, state)
            if len(names) == 1 and path.startswith(step.path.rpartition(".")[0]):
                return SyncStep(path, "fwd_pre", "all_gather", axis, next(iter(names)), step.nbytes)
    return SyncStep(step.path, "fwd_pre", "all_gather", axis, step.argument, step.nbytes)


def _shared(path: str, group: Group, root: nn.Module, state: Sharded) -> dict[str, list[str]]:
    columns = {root.get_submodule(step.path) for step in group.shards if step.path.startswith(f"{path}.")}
    rows = {root.get_submodule(step.path) for step in group.syncs if step.mode == "fwd_post"}
    return _shared_of(root.get_submodule(path), columns - rows, state)


def _shared_of(module: nn.Module, columns: set[nn.Module], state: Sharded) -> dict[str, list[str]]:
    whole = state.whole_forward(module)
    if isinstance(whole, TraceError):
        return {}
    try:
        return shared_inputs(module, whole, columns.__contains__)
    except ShardError:
        return {}


def _axis(found: Propagated, value: OpNode, factor: Factor) -> int | None:
    """Return the first dimension of ``value`` with the factor, or None."""
    dims = found.dims.get(value)
    dims = dims[0] if isinstance(dims, tuple) and dims else dims  # what a module computes is its first
    axes = [at for at, dim in enumerate(dims or ()) if factor in factors(dim)]
    return axes[0] if axes else None
