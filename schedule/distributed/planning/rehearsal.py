"""Second trace of a module's forward, with the tensor sizes of one rank.

A rank runs the Python code of the whole model on smaller tensors. A size of a sharded dimension that only shapes
tensors does no harm, but it may also decide on a branch or scale a value::

    h = self.up(x)
    y = self.down(h / h.shape[-1])  # on each of two ranks, h.shape[-1] is half as large

So the forward is traced again with the parameters and size attributes of one rank, and both graphs are compared: same
operations, same constants, and different sizes only where an operation takes a size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.tensor_kinds import failures_unlogged
from schedule.capture import Call, Recording, Specialization, TensorSpec, is_check, leaves, original_class, specialize
from schedule.distributed.planning.factored_values import CONSTANTS
from schedule.distributed.planning.plan_steps import ShardStep
from schedule.distributed.tensor_parallel.sharded_modules import Split, own_features
from schedule.patterns.normalize import normalize
from schedule.patterns.normalized_nodes import OpNode, operands
from schedule.util.errors import ScheduleError, ShardError
from schedule.util.internal_errors import InternalError
from schedule.util.tensors import tensor_at
from schedule.util.user_code import UserCodeError, user_code

_SIZE_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "view": ("size",),
    "reshape": ("shape",),
    "expand": ("size",),
    "broadcast_to": ("size",),
    "unflatten": ("sizes",),
    "split": ("split_size_or_sections",),
    "narrow": ("start", "length"),
    "getitem": ("index",),
    "setitem": ("index",),
    "full": ("0", "size"),
    "new_full": ("1", "size"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), ("groups",)),
}
"""Arguments that only give shape to a result, and the groups of a convolution: as many as there are channels."""


class CannotRun(ShardError):
    """The forward raises on the sizes of one rank."""


def rehearse(
    module: nn.Module,
    whole: Specialization,
    recording: Recording,
    shards: Iterable[ShardStep],
    settings: Mapping[str, int],
    ranks: int,
    call: Call,
    enter: Callable[[nn.Module, str], bool] | None = None,
    outputs: Mapping[nn.Module, Any] | None = None,
) -> dict[fx.Node, Any]:
    """Trace the forward of ``module`` as the first rank runs it, and compare it with the whole one.

    Args:
        module: the module; unchanged afterwards.
        whole: its whole forward.
        recording: the run in which its call was recorded.
        shards: the sharded parameters below ``module``, with paths relative to it.
        settings: attributes of ``module`` → their values on a rank.
        ranks: the number of ranks.
        call: its call on a rank; other than that of ``whole`` if its inputs are sharded.
        enter: predicate for the submodules inlined in ``whole``.
        outputs: submodule → the spec of its output on a rank, where it is not computed from its inputs.

    Returns:
        Operation of ``whole`` → the spec of its result on one rank.

    Raises:
        CannotRun: it raises on the sizes of one rank.
        ShardError: a rank would compute something else.
    """
    shards = tuple(shards)
    others = _without(recording, module, shards)
    others.assumed.update(outputs or {})
    try:
        with _sizes_of_one_rank(module, recording, shards, settings, ranks), failures_unlogged(), user_code():
            own = specialize(module, original_class(module).forward, call, others, False, enter)
    except InternalError:
        raise
    except (ScheduleError, UserCodeError) as error:
        why = f"its code cannot run on the sizes of one rank: {getattr(error, 'why', error)}"
        raise CannotRun(why, fix="leave these features whole") from error
    return _Comparison(views=all(step.replicas == 1 for step in shards)).own_specs(whole.graph, own.graph)


def _without(recording: Recording, module: nn.Module, shards: Iterable[ShardStep]) -> Recording:
    """Return a copy of ``recording`` without the calls of modules with shards in them."""
    sharded = {module.get_submodule(step.path) for step in shards}
    calls = {one: made for one, made in recording.calls.items() if sharded.isdisjoint(one.modules())}
    returned = defaultdict(list, {key: list(made) for key, made in recording.returned.items() if key[0] in calls})
    return replace(recording, calls=calls, traced={}, returned=returned, assumed={})


@contextmanager
def _sizes_of_one_rank(
    module: nn.Module, recording: Recording, shards: Iterable[ShardStep], settings: Mapping[str, int], ranks: int
) -> Iterator[None]:
    """Replace parameters and buffers by data-free ones of the first rank, and set size attributes, for the block."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    local: dict[int, torch.Tensor] = {}  # by the id of the real tensor: a tied one has several names

    def update(table: dict[str, Any], values: Mapping[str, Any]) -> None:
        saved.append((table, {name: table[name] for name in values}))
        table.update(values)

    def local_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in local:
            local[id(tensor)] = _data_free(tensor, recording, tensor.shape)
        return local[id(tensor)]

    try:
        for step in shards:
            path, _, name = f"{step.path}.{step.name}".strip(".").rpartition(".")
            owner = module.get_submodule(path)
            tensor = tensor_at(owner, name)
            split = Split(step.axis, tensor.shape[step.axis], step.parts, step.replicas, step.common)
            shape = list(tensor.shape)
            shape[step.axis] = split.local(ranks, 0)
            local[id(tensor)] = _data_free(tensor, recording, shape)
            sizes = own_features(owner, name, split, ranks, 0)
            update(vars(owner), {name: size for name, size in sizes.items() if name in vars(owner)})
        update(vars(module), {name: size for name, size in settings.items() if name in vars(module)})
        for child in module.modules():  # fake modes keep weak references to real tensors, which then cannot be swapped
            for table in (child._parameters, child._buffers):
                update(table, {name: local_of(each) for name, each in table.items() if each is not None})
        yield
    finally:
        for table, before in reversed(saved):
            table.update(before)


def _data_free(tensor: torch.Tensor, recording: Recording, shape: Sequence[int]) -> torch.Tensor:
    made: torch.Tensor = recording.materialize(replace(TensorSpec.of(tensor), shape=tuple(shape)))
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _Comparison:
    """Comparison of the graphs traced with whole sizes and with those of one rank.

    Args:
        views: whether views are compared. With replicas, keys and values need not be repeated on a rank, and its code
            may have fewer views.
    """

    def __init__(self, views: bool) -> None:
        self.views = views
        self.twin: dict[OpNode, OpNode] = {}
        self.constants: set[OpNode] = set()  # tensors made of constants alone, with the size of a shard

    def own_specs(self, whole: fx.Graph, own: fx.Graph) -> dict[fx.Node, Any]:
        """Return the specs on one rank, or raise if the graphs differ in more than sizes."""
        ours, theirs = self.operations(whole), self.operations(own)
        for one, other in zip(ours, theirs, strict=False):
            self.compare(one, other)
            self.twin[one] = other
        if len(ours) != len(theirs):
            raise _another_path(max(ours, theirs, key=len)[min(len(ours), len(theirs))])
        return {one.fx: other.spec for one, other in self.twin.items() if one.fx is not None}

    def operations(self, graph: fx.Graph) -> list[OpNode]:
        """Return the operations of ``graph`` except those that compute sizes or check them."""
        found = [node for node in normalize(graph).nodes if not _is_size(node) and not is_check(node.target)]
        return [node for node in found if self.views or not node.is_view]

    def compare(self, one: OpNode, other: OpNode) -> None:
        named = isinstance(one.target, str) and one.target != other.target
        if one.op != other.op or named or one.args.keys() != other.args.keys():
            raise _another_path(one)
        changed = {name for name, value in one.args.items() if self.changed(one, value, other.args[name])}
        if not _only_shapes(one, changed):
            raise _different(f"{_name(one)} computes with a size of the shard, not with the whole size{_at(one)}")
        given, shape = set(operands(one.args)), _shape(one)
        if self.is_constant(one, given) and shape != _shape(other):
            self.constants.add(one)
        elif one.mutates:
            self.constants -= given
        elif shape is not None and shape == _shape(other) and not given.isdisjoint(self.constants):
            raise _different(f"{_name(one)} of a tensor as large as the shard{_at(one)}")

    def is_constant(self, node: OpNode, given: Collection[OpNode]) -> bool:
        """Check whether ``node`` makes a constant tensor, or computes with nothing but these."""
        tensors = [one for one in given if isinstance(one.spec, TensorSpec)]
        return _name(node) in CONSTANTS or (bool(tensors) and self.constants.issuperset(tensors))

    def changed(self, node: OpNode, one: Any, other: Any) -> bool:
        """Check whether a size in an argument differs on one rank, or raise if more than a size differs."""
        one, other = (each.spec if isinstance(each, OpNode) and _is_size(each) else each for each in (one, other))
        if isinstance(one, slice) and isinstance(other, slice):
            one, other = ((each.start, each.stop, each.step) for each in (one, other))
        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            one, other = list(one.values()), [other[key] for key in one]
        if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
            return any([self.changed(node, *pair) for pair in zip(one, other, strict=True)])
        if isinstance(one, OpNode) and isinstance(other, OpNode):
            if not self.views:
                one, other = one.source, other.source
            if self.twin.get(one) is not other:
                raise _another_path(node)
            return False
        if isinstance(one, int) and isinstance(other, int):
            return int(one) != int(other)
        if isinstance(one, OpNode) or isinstance(other, OpNode) or type(one) is not type(other):
            raise _another_path(node)
        return bool(one != other)


def _is_size(node: OpNode) -> bool:
    return node.is_metadata or _is_number(node.spec)


def _is_number(spec: Any) -> bool:
    """Check whether a value is a number or a nesting of numbers, such as the shape of a tensor."""
    return all(isinstance(leaf, (int, float)) for _, leaf in leaves(spec))


def _different(why: str) -> ShardError:
    return ShardError(why, fix="leave these features whole")


def _another_path(node: OpNode) -> ShardError:
    return _different(f"the sizes of the shard lead its code another way{_at(node)}")


def _only_shapes(node: OpNode, changed: Collection[str]) -> bool:
    """Check whether the ``changed`` arguments of ``node`` only give shape to its result."""
    name = _name(node)
    if name in CONSTANTS and name not in _SIZE_ARGUMENTS:
        return True
    return all(each in _SIZE_ARGUMENTS.get(name, ()) for each in changed)


def _name(node: OpNode) -> str:
    return node.op.rpartition(".")[2]


def _at(node: OpNode) -> str:
    source = node.fx.meta.get("source", "") if node.fx is not None else ""
    return f" ({source.strip()})" if source else ""


def _shape(node: OpNode) -> Any:
    return node.spec.shape if isinstance(node.spec, TensorSpec) else None
