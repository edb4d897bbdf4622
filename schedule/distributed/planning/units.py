"""Modules that work on the whole sequence inside a layer that otherwise works on parts of it.

Experts, or a Linear of a model's own making, share out parameters of their own, and which dimensions of theirs are the
sequence is not followed. An attention that stays whole works along the sequence. Around the smallest module that takes
and returns ``[batch, seq, features]`` the sequence is gathered, and what it returns is shared out again.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from schedule.capture.recording.recording import Call
from schedule.capture.recording.specs import TensorSpec
from schedule.distributed.planning.plan_steps import Group, ShardStep, SyncStep
from schedule.distributed.tensor_parallel.modules import projection_of
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.util.errors import TraceError


class NotSequential(Exception):
    """Why a layer cannot work on a part of the sequence."""


@dataclass(frozen=True)
class Unit:
    """A module that works on the whole sequence.

    Attributes:
        path: the module.
        argument: the input that is gathered before it; what it returns is shared out again.
        nbytes: of that input.
    """

    path: str
    argument: str
    nbytes: int


def units_of(layer: str, length: int, inner: list[Group], root: nn.Module, state: Sharded) -> dict[str, Unit]:
    """By path, the smallest modules in a layer around each that shares out parameters of its own.

    Args:
        layer: its path.
        length: of the sequence.
        inner: the groups in it.
        root: where paths begin.
        state: with the recorded run.

    Raises:
        NotSequential: there is none in the layer.
    """
    units: dict[str, Unit] = {}
    for path in dict.fromkeys(step.path for group in inner for step in group.shards):
        if projection_of(root.get_submodule(path)) is None and not isinstance(root.get_submodule(path), nn.Embedding):
            unit = _unit(path, layer, length, root, state)
            units[unit.path] = unit
    return units


def _unit(path: str, layer: str, length: int, root: nn.Module, state: Sharded) -> Unit:
    """Of the modules around ``path``, the smallest that takes and returns ``[batch, seq, features]``."""
    parts = path.split(".")
    for end in range(len(parts), layer.count(".") + 1, -1):
        unit = _as_unit(".".join(parts[:end]), length, root, state.whole_calls)
        if unit is not None:
            return unit
    raise NotSequential(f"{path} shards parameters of its own, and no module next to it works along the sequence")


def whole_units(layer: str, length: int, inner: list[Group], root: nn.Module, state: Sharded) -> Iterator[Unit]:
    """The modules that a layer calls which multiply, share out nothing, and take and return the sequence.

    Args:
        layer: its path.
        length: of the sequence.
        inner: the groups in it.
        root: where paths begin.
        state: with the recorded run.
    """
    for name, child in root.get_submodule(layer).named_children():
        path = f"{layer}.{name}"
        shared = any(f"{step.path}.".startswith(f"{path}.") for group in inner for step in group.shards)
        if not shared and any(projection_of(one) is not None for one in child.modules() if one is not child):
            unit = _as_unit(path, length, root, state.whole_calls)
            if unit is not None:
                yield unit


def _as_unit(path: str, length: int, root: nn.Module, calls: Mapping[nn.Module, list[Call]]) -> Unit | None:
    """The module at ``path``, if it takes and first returns ``[batch, seq, features]``."""
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
    """The part of a group that is in none of the units."""

    def outside(step: ShardStep | SyncStep) -> bool:
        return not any(f"{step.path}.".startswith(f"{unit}.") for unit in units)

    return replace(group, shards=list(filter(outside, group.shards)), syncs=list(filter(outside, group.syncs)))


_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")


def summed_outside(
    units: dict[str, Unit], inner: list[Group], root: nn.Module, state: Sharded
) -> Iterator[tuple[SyncStep, SyncStep]]:
    """Where a unit returns views of partial sums, they are added up and shared out in one."""
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
    """Whether nothing but views of ``node`` is made of it, and returned."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    if user.op == "output":
        return True
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    return name in _VIEWS and user.args[:1] == (node,) and _returned(user)
