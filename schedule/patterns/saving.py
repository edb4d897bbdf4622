"""Check for tensors saved by autograd in a region of a graph and changed in place afterwards.

Eager torch saves ``h + b`` for the backward pass of ``gelu(h + b)``; a fused op saves ``h``, so that a later
``h.zero_()``, which eager torch allows, would raise in the backward pass. Running both shows what each saves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

import fused
from schedule.capture import TensorSpec
from schedule.patterns.hazards import Hazards
from schedule.util.errors import MatchError, ScheduleError
from schedule.util.internal_errors import InternalError
from schedule.util.user_code import UserCodeError, user_code

Modules = Mapping[str, nn.Module] | None


def changed_later(
    region: Collection[fx.Node], outputs: Collection[fx.Node], hazards: Hazards
) -> dict[fx.Node, fx.Node]:
    """Return the inputs and outputs of a region changed in place after it, each with the node changing it."""
    last = max(region)
    values = {given for node in region for given in node.all_input_nodes if given not in region}.union(outputs)
    found = {value: _change(value, last, region, hazards) for value in values}
    return {value: change for value, change in found.items() if change is not None}


def _change(value: fx.Node, last: fx.Node, region: Collection[fx.Node], hazards: Hazards) -> fx.Node | None:
    """Return a node after ``last`` changing the memory of ``value``, perhaps through a view, or None."""
    stack = list(hazards.memory([value]))
    seen = set(stack)
    while stack:
        owner = stack.pop()
        for user in owner.users:
            known = hazards.effects(user)
            if last < user and owner in known.mutates:
                return user
            if user not in seen and user not in region and not (known.fresh or known.opaque):
                seen.add(user)
                stack.append(user)
    return None


def refuse_saving(
    region: Collection[fx.Node],
    ends: Mapping[fx.Node, fx.Node | None],
    made: Sequence[fx.Node],
    hazards: Hazards,
) -> None:
    """Raise if a replacement newly saves a tensor changed in place later.

    A tensor that the region saved as well is allowed.

    Args:
        ends: the outputs of the region, each with its replacement node.
        made: the nodes of the replacement, in order.

    Raises:
        MatchError: there is such a tensor.
    """
    changed = changed_later({*region, *made}, ends, hazards)
    if not changed:
        return
    before, after = {value: value for value in changed}, {value: ends.get(value, value) for value in changed}
    inputs = {each for node in (*region, *made) for each in node.all_input_nodes if each not in region}
    given = {_origin(node) for node in inputs.difference(made)}.union(
        _origin(node) for node in (*region, *made) if node.op == "get_attr"
    )
    given = {each for each in given if not _is_constant(each, hazards)}
    for differentiated in (given, *({each} for each in given)):  # what an op saves depends on what asks for a gradient
        was = _saved(sorted(region), before, differentiated, hazards.modules)
        now = _saved(made, after, differentiated, hazards.modules)
        for value, change in changed.items():
            if (was is None or value not in was) and (now is None or value in now):
                raise MatchError(
                    f"the replacement would keep {value.name} for the backward pass, and {change.name} changes it in "
                    "place",
                    node=change,
                    fix="use the operation that is not in place",
                )


def _is_constant(origin: fx.Node | str, hazards: Hazards) -> bool:
    """Check whether a value is a buffer, which some functions take only without a gradient."""
    tensor = hazards.attribute(origin) if isinstance(origin, str) else None
    return tensor is not None and not (isinstance(tensor, nn.Parameter) or tensor.requires_grad)


def _saved(
    nodes: Sequence[fx.Node],
    wanted: Mapping[fx.Node, fx.Node | None],
    differentiated: Collection[fx.Node | str],
    modules: Modules,
) -> set[fx.Node] | None:
    """Return the keys of ``wanted`` with values saved by autograd in ``nodes``, or None if these cannot be run.

    Args:
        differentiated: the inputs that require a gradient; parameters by their paths.
    """
    values: dict[fx.Node, Any] = {}
    saved: list[torch.UntypedStorage] = []  # alive until the end, so that no two have one address

    def pack(tensor: torch.Tensor) -> None:  # a tensor kept by it would never be freed: its node keeps this function
        saved.append(tensor.untyped_storage())

    contexts = (
        *(torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad(), fused.backend("reference")),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing),
    )
    try:
        with user_code(), ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each)
            for node in nodes:
                values[node] = _run(node, values, differentiated, modules)
    except InternalError:
        raise
    except (ScheduleError, UserCodeError):  # on tensors that are all zeros
        return None
    storages = {storage._cdata for storage in saved}
    found = {key: values.get(node) for key, node in wanted.items() if node is not None}
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    return {key for key, tensor in tensors.items() if tensor.untyped_storage()._cdata in storages}


def _run(node: fx.Node, values: dict[fx.Node, Any], differentiated: Collection[fx.Node | str], modules: Modules) -> Any:
    if node.op == "get_attr":
        return _like(node, _origin(node) in differentiated)

    def value(given: fx.Node) -> Any:
        if given not in values:
            values[given] = _like(given, _origin(given) in differentiated)
        return values[given]

    args: Any = fx.node.map_arg(node.args, value)
    kwargs: Any = fx.node.map_arg(node.kwargs, value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = (modules or {})[str(node.target)] if node.op == "call_module" else node.target
    return function(*args, **kwargs)


def _origin(node: fx.Node) -> fx.Node | str:
    """Return the identity of a value: the path for any read of a parameter, else the node."""
    return str(node.target) if node.op == "get_attr" else node


def _like(node: fx.Node, differentiated: bool) -> Any:
    """Return a value as in the recorded run, with zeros for a tensor.

    The tensor may be changed in place.
    """
    spec = node.meta["spec"]
    if not isinstance(spec, TensorSpec):
        return spec
    zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    return zeros.requires_grad_().clone() if differentiated and spec.dtype.is_floating_point else zeros
