"""Modules on the whole sequence inside a layer with sequence parallelism.

Experts, or a custom Linear class of a model, shard their own parameters, and the sequence dimension is not followed
through their code. An unsharded attention works along the sequence. The sequence is gathered before the smallest
enclosing module that takes and returns ``[batch, seq, features]``, and the output of this module is sharded again.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from schedule.capture import Call, TensorSpec
from schedule.distributed.planning.plan_steps import Group, ShardStep, SyncStep
from schedule.distributed.tensor_parallel.sharded_modules import projection_of
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.util.errors import TraceError


class NotSequential(Exception):
    """Raised with the reason if a layer cannot work on a part of the sequence."""


@dataclass(frozen=True)
class Unit:
    """A module running on the whole sequence.

    Attributes:
        path: the path of the module.
        argument: the input to gather before the module; the output is sharded again.
        nbytes: the bytes of the input.
    """

    path: str
    argument: str
    nbytes: int


def units_of(layer: str, length: int, inner: list[Group], root: nn.Module, state: Sharded) -> dict[str, Unit]:
    """Return by path the smallest units around the modules of a layer with sharded parameters of their own.

    Projections and embeddings do not need a unit.

    Args:
        layer: the path of the layer.
        length: the length of the sequence.
        inner: the parts of the groups in the layer.
        root: the module at which paths begin.
        state: the tensor-parallel state with the recorded run.

    Raises:
        NotSequential: one of these modules has no unit around it in the layer.
    """
    units: dict[str, Unit] = {}
    for path in dict.fromkeys(step.path for group in inner for step in group.shards):
        if projection_of(root.get_submodule(path)) is None and not isinstance(root.get_submodule(path), nn.Embedding):
            unit = _unit(path, layer, length, root, state)
            units[unit.path] = unit
    return units


def _unit(path: str, layer: str, length: int, root: nn.Module, state: Sharded) -> Unit:
    """Return the smallest module around ``path`` with input and output ``[batch, seq, features]``."""
    parts = path.split(".")
    for end in range(len(parts), layer.count(".") + 1, -1):
        unit = _as_unit(".".join(parts[:end]), length, root, state.whole_calls)
        if unit is not None:
            return unit
    raise NotSequential(f"{path} shards parameters of its own, and no module next to it works along the sequence")


def whole_units(layer: str, length: int, inner: list[Group], root: nn.Module, state: Sharded) -> Iterator[Unit]:
    """Yield the unsharded children of a layer with projections and with input and output ``[batch, seq, features]``.

    Args:
        layer: the path of the layer.
        length: the length of the sequence.
        inner: the parts of the groups in the layer.
        root: the module at which paths begin.
        state: the tensor-parallel state with the recorded run.
    """
    for name, child in root.get_submodule(layer).named_children():
        path = f"{layer}.{name}"
        shared = any(f"{step.path}.".startswith(f"{path}.") for group in inner for step in group.shards)
        if not shared and any(projection_of(one) is not None for one in child.modules() if one is not child):
            unit = _as_unit(path, length, root, state.whole_calls)
            if unit is not None:
                yield unit


def _as_unit(path: str, length: int, root: nn.Module, calls: Mapping[nn.Module, list[Call]]) -> Unit | None:
    """Return the module at ``path`` as a unit if its first input and output are ``[batch, seq, features]``."""
    module = root.get_submodule(path)
    for call in calls.get(module, [])[:1]:
        names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        name, spec = next(iter(given.items()), ("", None))
        output = call.output[0] if isinstance(call.output, (tuple, list)) and call.output else call.output
        if isinstance(spec, TensorSpec) and _in_sequence(spec, length) and _in_sequence(output, length):
            return Unit(path, name, spec.nbytes)
    return None


def _in_sequence(spec: Any, length: int) -> bool:
    return isinstance(spec, TensorSpec) and spec.ndim == 3 and spec.shape[1] == length and spec.dtype.is_floating_point


def without_units(group: Group, units: Collection[str]) -> Group:
    """Return the part of a group outside of the units."""

    def outside(step: ShardStep | SyncStep) -> bool:
        return not any(f"{step.path}.".startswith(f"{unit}.") for unit in units)

    return replace(group, shards=list(filter(outside, group.shards)), syncs=list(filter(outside, group.syncs)))


_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")


def summed_outside(
    units: dict[str, Unit], inner: list[Group], root: nn.Module, state: Sharded
) -> Iterator[tuple[SyncStep, SyncStep]]:
    """Yield all-reduces inside units with a reduce-scatter of the unit output to replace them.

    This applies to units that return a view of the partial sums.
    """
    for step in (step for group in inner for step in group.syncs):
        unit = next((one for one in units.values() if step.path.startswith(f"{one.path}.")), None)
        if unit is None or (step.mode, step.op) != ("fwd_post", "all_reduce"):
            continue
        whole = state.whole_forward(root.get_submodule(unit.path))
        inside = step.path.removeprefix(f"{unit.path}.")
        calls = [] if isinstance(whole, TraceError) else [n for n in whole.graph.nodes if n.target == inside]
        if len(calls) == 1 and _returned(calls[0]):
            yield step, SyncStep(unit.path, "fwd_post", "reduce_scatter", 1, nbytes=step.nbytes)


def _returned(node: fx.Node) -> bool:
    """Check whether ``node`` is used only once, to return it or a view of it."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    if user.op == "output":
        return True
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    return name in _VIEWS and user.args[:1] == (node,) and _returned(user)
