"""Context parallelism: each rank has its part of the sequence from the first layer to the last, attention included.

A layer allows it if its graph keeps the positions of the sequence apart everywhere but in
``scaled_dot_product_attention``, whose keys and values are gathered. Other inputs along the sequence, such as rotary
tables, are sliced; masks stay whole. Every rank has all parameters, whose gradients are sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from schedule.capture import Call, Specialization, TensorSpec, leaves, specialize
from schedule.distributed.planning.chains import Link, chains_of
from schedule.distributed.planning.factored_values import Propagated, nbytes
from schedule.distributed.planning.factors import Factor, factors, has
from schedule.distributed.planning.owned import holds, spec_on_one_rank
from schedule.distributed.planning.plan_data import Plan
from schedule.distributed.planning.plan_steps import POSITIONS, Group, SyncStep
from schedule.distributed.planning.propagation import propagate
from schedule.distributed.planning.rehearsal import rehearse
from schedule.distributed.tensor_parallel.contexts import refuse_objects
from schedule.distributed.tensor_parallel.sharded_modules import (
    ATTENTION,
    ContextInput,
    input_names,
    projection_of,
    stays_call,
)
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.runtime.scheduled import forward_of
from schedule.util.errors import ShardError, TraceError

_SDPA = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Context:
    """How a module works on a part of the sequence.

    Attributes:
        argument: the name of the input with the hidden states, ``[batch, seq, features]``.
        inputs: its other inputs that are sliced, or whose gradients are summed.
        attention: the bytes of the keys and values of each attention in the recorded run, on all ranks together.
    """

    argument: str
    inputs: tuple[ContextInput, ...]
    attention: tuple[int, ...]


def find_contexts(root: nn.Module, state: Sharded) -> Plan:
    """Return the plan with all suitable chains of layers working on parts of the sequence.

    The reasons against the others are in ``Plan.whole``.

    Args:
        root: the module at which paths begin.
        state: the ranks, with the recorded run.
    """
    projections = [path for path, module in root.named_modules() if projection_of(module) is not None]
    groups, boundaries, whole = list[Group](), list[SyncStep](), dict[str, str]()
    tried: set[str] = set()
    for chain in chains_of(projections, root, state):
        if any(link.path.startswith(f"{path}.") for link in chain for path in tried):
            continue
        tried |= {link.path for link in chain}
        try:
            found = [context_of(root.get_submodule(link.path), link.argument, state) for link in chain]
        except ShardError as error:
            whole[f"sequence of {chain[0].path}"] = error.why
            continue
        without = [link.path for link, one in zip(chain, found, strict=True) if one.inputs and not one.attention]
        if without:
            whole[f"sequence of {chain[0].path}"] = f"{without[0]} has other inputs and no attention"
        elif any(context.attention for context in found):
            groups += [_group(link, context, root) for link, context in zip(chain, found, strict=True)]
            first, last = chain[0], chain[-1]
            boundaries.append(SyncStep(first.path, "fwd_pre", "scatter", 1, first.argument, first.nbytes))
            boundaries.append(SyncStep(last.path, "fwd_post", "RSR->RRR", nbytes=last.nbytes))
    return Plan(state.tp.size, groups, whole, boundaries)


def _group(link: Link, context: Context, root: nn.Module) -> Group:
    steps = [SyncStep(link.path, ATTENTION, "all_gather", 1, link.argument, size) for size in context.attention]
    for path, name, parameter in parameters_below(link.path, root.get_submodule(link.path)):
        size = parameter.numel() * parameter.element_size()
        steps.append(SyncStep(path, "bwd_post", "all_reduce", argument=name, nbytes=size))
    return Group(link.path, link.length, [], steps, POSITIONS)


def parameters_below(path: str, module: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the parameters in ``module`` at ``path``: path of their module, name, parameter."""
    for inner, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield f"{path}.{inner}".strip("."), name, parameter


def context_of(module: nn.Module, argument: str | None, state: Sharded) -> Context:
    """Return how ``module`` works on a part of the sequence.

    Args:
        module: the module.
        argument: the name of the input with the hidden states, by default the first.
        state: the ranks, with the recorded run.

    Raises:
        ShardError: it cannot.
    """
    calls = state.recording.calls.get(module)
    if not calls:
        raise _cannot("it was not called in the recorded run")
    argument, call = argument or input_names(module)[0], calls[0]
    given = {**dict(zip(input_names(module), call.args, strict=False)), **call.kwargs}
    refuse_objects(given)
    try:
        made = specialize(module, forward_of(module), call, state.recording, False, _enter)
    except TraceError as error:
        raise _cannot(error.why) from error
    found = propagate(made.graph, module, (), set(made.signature.inputs), returned=True, gathers=True)
    texts = {made.signature.inputs[str(node.target)]: node for node in found.nodes if node.op == "placeholder"}
    factor = _factor(texts.get(argument), found, argument, state.tp.size)
    masks, sizes = _attention(found, factor)
    _check(found, factor, masks)
    placed = {
        (name, *(step for _, step in path)): texts[text]
        for name, value in given.items()
        for path, _ in leaves(value)
        if (text := name + "".join(f"[{step!r}]" for _, step in path)) in texts
    }
    _rehearse(module, made, found, factor, call, placed, state)
    inputs = []
    for (name, *steps), node in placed.items():
        axis = None if node in masks else _axis(found, node, factor)
        floating = isinstance(node.spec, TensorSpec) and node.spec.dtype.is_floating_point
        if name != argument and node not in masks and (axis is not None or floating):
            inputs.append(ContextInput(name, tuple(steps), axis))
    lost = [text for text, node in texts.items() if holds(found, node, factor) and node not in placed.values()]
    if lost:
        raise _cannot(f"its input {lost[0]} is along the sequence, and no argument of its own")
    return Context(argument, tuple(inputs), sizes)


def _enter(child: nn.Module, path: str) -> bool:
    return not stays_call(child)


def _cannot(why: str) -> ShardError:
    return ShardError(f"it cannot work on a part of the sequence: {why}", fix="leave the sequence whole there")


def _factor(stream: OpNode | None, found: Propagated, argument: str, ranks: int) -> Factor:
    """Return the factor of the sequence of the hidden states."""
    spec = None if stream is None else stream.spec
    if stream is None or not isinstance(spec, TensorSpec) or spec.ndim != 3:
        raise _cannot(f"its argument {argument!r} is not [batch, seq, features]")
    own = factors(found.dims[stream][1])
    if len(own) != 1 or own[0].blocked:
        raise _cannot(own[0].blocked if own else f"{argument} has one token")
    if own[0].size % ranks:
        raise ShardError(
            f"a sequence of {own[0].size} tokens cannot be shared evenly by {ranks} ranks",
            fix="pad it to a multiple of the ranks",
        )
    return own[0]


def _attention(found: Propagated, factor: Factor) -> tuple[set[OpNode], tuple[int, ...]]:
    """Return the masks of all attentions, and the bytes of the keys and values of each."""
    masks, sizes = set[OpNode](), list[int]()
    for node in found.nodes:
        if node.op != _SDPA:
            continue
        query, key, value, mask = (node.args.get(name) for name in ("query", "key", "value", "attn_mask"))
        for one in (query, key, value):
            dims = found.dims.get(one)  # type: ignore[arg-type]
            if not isinstance(dims, list) or factors(dims[-2]) != [factor]:
                raise _cannot("its attention is to another sequence than that of its queries")
        sizes.append(nbytes(key.spec) + nbytes(value.spec))  # type: ignore[union-attr]
        if isinstance(mask, OpNode) and holds(found, mask, factor):
            if mask.op != "placeholder":
                raise _cannot(f"{mask.op} computes the mask of its attention in it, of a part of the sequence")
            masks.add(mask)
    return masks, tuple(sizes)


def _check(found: Propagated, factor: Factor, masks: set[OpNode]) -> None:
    """Raise if something of the whole sequence meets a part of it, or is returned."""
    for node in found.nodes:
        if node.op == "get_attr" and holds(found, node, factor):
            raise _cannot(f"{node.target} is read along the sequence")
        owner = str(node.target).rpartition(".")[0]
        if node.op == "get_attr" and node.fx is not None and node.fx.meta.get("module", owner) != owner:
            raise _cannot(f"{node.target} is read by the code of another module")
        if node.op == "output":
            first, *others = operands(node.args)
            if _axis(found, first, factor) != 1 or any(holds(found, one, factor) for one in others):
                raise _cannot("it returns something else along the sequence than the hidden states")
        elif node.op != _SDPA and any(one in masks for one in operands(node.args)) and not node.is_metadata:
            raise _cannot(f"{node.op} reads the mask of its attention, which stays whole")


def _axis(found: Propagated, node: OpNode, factor: Factor) -> int | None:
    """Return the only dimension with the factor, or None."""
    dims = found.dims.get(node)
    axes = [at for at, dim in enumerate(dims if isinstance(dims, list) else ()) if has(dim, factor)]
    if len(axes) > 1:
        raise _cannot(f"{node.target} is along the sequence twice")
    return axes[0] if axes else None


def _rehearse(
    module: nn.Module,
    made: Specialization,
    found: Propagated,
    factor: Factor,
    call: Call,
    placed: Mapping[tuple[Any, ...], OpNode],
    state: Sharded,
) -> None:
    """Raise if the code of ``module`` does something else on a sequence as short as a part, with a mask as short."""
    own = {steps: spec_on_one_rank(found, node, factor, state.tp.size) for steps, node in placed.items()}

    def shortened(value: Any, *steps: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(shortened(one, *steps, at) for at, one in enumerate(value))
        return own.get(steps, value)

    args = tuple(shortened(value, name) for name, value in zip(input_names(module), call.args, strict=False))
    part = Call(args, {name: shortened(value, name) for name, value in call.kwargs.items()}, None)
    rehearse(module, made, state.recording, (), {}, state.tp.size, part, _enter)
