"""``shard``: sharding of a parameter over the tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from schedule.core.edits import SetItem, SetSpecializations
from schedule.distributed.tensor_parallel.callers import WrapForward
from schedule.distributed.tensor_parallel.conflicts import check_split
from schedule.distributed.tensor_parallel.forwards import sharded_specializations
from schedule.distributed.tensor_parallel.parameters import ShardedTensor, owners
from schedule.distributed.tensor_parallel.shard_edits import ConvertOnLoad, ForgetRun, FreeWhole, ShardParameter
from schedule.distributed.tensor_parallel.sharded_modules import (
    COLUMN,
    SHARDING,
    Split,
    own_features,
    projection_of,
    sharding_of,
)
from schedule.distributed.tensor_parallel.state import fresh_sharding, sharded_state
from schedule.distributed.tensor_parallel.wrapped import ShardedForward
from schedule.primitives.registry import primitive
from schedule.runtime.scheduled import state_of
from schedule.util.errors import NotApplicable, ShardError

if TYPE_CHECKING:
    from schedule.core.history import Edit
    from schedule.core.node import Node
    from schedule.distributed.tensor_parallel.sharded_modules import ModuleSharding, Split
    from schedule.distributed.tensor_parallel.state import Sharded


@primitive
def shard(sch: Node, name: str, axis: int, parts: int = 1, replicas: int = 1, common: int = 0) -> None:
    """Shard a parameter or buffer over the tensor-parallel ranks.

    ::

        before:  y = F.linear(x, self.weight, self.bias)                         weight [out, in]
        after:   y = F.linear(x, self.weight.to_local()) + self.bias.to_local()  local weight [out / n, in]

    The parameter becomes a DTensor of the same name; the module takes and returns plain local tensors. Sharding the
    outputs (axis 0 of a Linear's weight, 1 of a Conv1D's) makes it column-parallel, sharding the inputs
    row-parallel; :meth:`sync` adds the collectives. The same holds for convolutions. Each rank looks up its own rows
    of an embedding (axis 0), and :meth:`sync` all-reduces the results. A batch norm, with all parameters and buffers
    sharded, and a grouped convolution work on each rank's own channels; any other module computes with its shard of
    its own parameter. The feature counts of the module are updated, and so are sizes and head counts stored in the
    calling module. Sizes need not divide evenly: they are split like ``torch.chunk``. Every rank must do the same.

    Args:
        sch: the module.
        name: of the parameter or buffer, such as ``"weight"`` or ``"bias"``; or ``"conv1d.weight"`` for one of a
            submodule that is not called because the code of this module reads the parameter itself.
        axis: dimension to shard; negative ones count from the end.
        parts: number of equal parts packed along ``axis``, such as 3 for GPT-2's q, k and v; each is sharded.
        replicas: number of consecutive ranks that compute with the same shard, for grouped queries with fewer
            key-value heads than ranks. The parameter itself stays whole on every rank.
        common: number of trailing outputs replicated on every rank, such as the one key and value that follow the
            queries of all heads. The parameter itself stays whole on every rank.

    Raises:
        ShardError: no mesh, no such parameter or axis, sharded already, tied to a module that cannot be sharded,
            heads that cannot be divided among the ranks; or another shard or sync contradicts it.
    """
    state, (inner, _, own) = sharded_state(sch.tree), name.rpartition(".")
    holder = sch.at(inner)
    state.remember_whole(sch.module)
    split = _checked(holder, state, own, Split(axis, 0, parts, replicas, common))
    refuse_inlined(holder, state, changes_shapes=True)
    edits = _edits(holder, state, own, split)
    sch.commit([*edits, *_reads(sch, state, name)] if inner else edits)


def _reads(sch: Node, state: Sharded, name: str) -> list[Edit]:
    """Return edits to let the forward of this module read a local tensor of a submodule."""
    refuse_rewritten(sch, sch.module)
    before = fresh_sharding(sch.module, state.tp)
    sharding = replace(before, reads=(*before.reads, name))
    return [SetItem(_vars(sch.module), SHARDING, sharding), reforward(sch, sch.module, sharding, state)]


def _checked(sch: Node, state: Sharded, name: str, asked: Split) -> Split:
    """Return the requested split with the actual axis and size, or raise if it cannot be made."""
    module, axis = sch.module, asked.axis
    tensor, sharding = _tensor(module, name), sharding_of(module)
    if sharding is not None and name in sharding.splits:
        raise ShardError(f"{name} is sharded already: {sharding.splits[name]}", fix="undo that shard first")
    if hasattr(tensor, "placements"):
        raise ShardError(f"{name} is a DTensor already: {tensor.placements}", fix="shard first, then fully_shard")
    if isinstance(axis, bool) or not isinstance(axis, int) or not -tensor.ndim <= axis < tensor.ndim:
        raise ShardError(
            f"{name} has {tensor.ndim} dimensions {tuple(tensor.shape)}, there is no axis {axis}",
            fix=f"an axis from {-tensor.ndim} to {tensor.ndim - 1}",
        )
    split = replace(asked, axis=axis % tensor.ndim, size=tensor.shape[axis])
    if split.size * max(split.replicas, 1) < state.tp.size:
        raise ShardError(
            f"{name} has {split.size} along axis {axis}, fewer than the {state.tp.size} ranks", fix="leave it whole"
        )
    for holder, own in _slots(sch, tensor, name):
        try:
            check_split(holder, own, split, state.tp.size, fresh_sharding(holder, state.tp))
            refuse_rewritten(sch, holder)
        except ShardError as error:
            if holder is not module:
                path = sch.tree.path_of(holder)
                raise ShardError(f"{name} is tied to {path}.{own}: {error.why}", fix="untie them first") from error
            raise
    return split


def _tensor(module: nn.Module, name: str) -> Tensor:
    tensor = module._parameters.get(name, module._buffers.get(name))
    if tensor is None:
        found = [n for table in (module._parameters, module._buffers) for n, t in table.items() if t is not None]
        names = ", ".join(map(repr, found)) or "none of its own"
        raise ShardError(f"it has no parameter {name!r}", fix=f"its parameters: {names}")
    return tensor


def _slots(sch: Node, tensor: Tensor, name: str) -> list[tuple[nn.Module, str]]:
    return owners(sch.tree.root, tensor) or [(sch.module, name)]


def refuse_rewritten(sch: Node, module: nn.Module) -> None:
    """Raise if another primitive has changed the module's own graph."""
    state, sharding = state_of(module), sharding_of(module)
    if state is None:
        return
    if projection_of(module) is None and not state.specializations:
        return
    ours = "" if sharding is None else str(sharded_specializations(module, sharding)[0].graph)
    if [str(made.graph) for made in state.specializations] != [ours] * 2:
        raise ShardError(f"{sch.tree.path_of(module)} was rewritten before", fix="shard and sync first, then fuse")


def refuse_inlined(sch: Node, state: Sharded, changes_shapes: bool) -> None:
    """Raise if a graph in use has the module inlined, or contains sizes about to change."""
    try:
        sch.refuse_inside_other_graph()
    except NotApplicable as error:
        raise ShardError(error.why, fix="shard and sync first, then fuse") from error
    caller = state.caller_of(sch.path)
    if changes_shapes and caller is not None and sch.tree.graphs.current(caller[0]):
        owner = sch.tree.path_of(caller[0]) or "the root"
        raise ShardError(
            f"{owner}, which calls it, was rewritten for whole tensors", fix="shard and sync first, then fuse"
        )


def _edits(sch: Node, state: Sharded, name: str, split: Split) -> list[Edit]:
    whole = _tensor(sch.module, name)
    slots = _slots(sch, whole, name)
    tensor = ShardedTensor(whole, slots, state.tp, split.axis, split.parts)
    edits: list[Edit] = [*state.tp.noted(f"{sch.path}.shard({name!r}, {split})")]
    edits.append(ForgetRun(sch.tree, [holder for holder, _ in slots]))
    if not split.stays_whole:
        edits.append(ShardParameter(tensor))
    for module, own in slots:
        sharding = fresh_sharding(module, state.tp).with_split(own, split)
        edits += _features(module, own, sharding, state)
        edits += _followers(sch, module, own, sharding, state)
        if sharding_of(module) is None or not sharding_of(module).splits:  # type: ignore[union-attr]
            edits.append(ConvertOnLoad(module))
        edits += [SetItem(_vars(module), SHARDING, sharding), reforward(sch, module, sharding, state)]
    return [*edits, FreeWhole(tensor)] if not split.stays_whole else edits


def _features(module: nn.Module, name: str, sharding: ModuleSharding, state: Sharded) -> list[Edit]:
    """Return edits of the module's own feature counts."""
    found = own_features(module, name, sharding.splits[name], state.tp.size, state.tp.rank)
    return [SetItem(_vars(module), attribute, number) for attribute, number in found.items()]


def _followers(sch: Node, module: nn.Module, name: str, sharding: ModuleSharding, state: Sharded) -> list[Edit]:
    """Return edits of the sizes stored in the calling module."""
    if name != "weight" or sharding.role(module) != COLUMN:
        return []
    followed = state.settings(module, sch.tree.path_of(module), sharding.splits["weight"])
    if followed is None:
        return []
    caller, settings = followed
    return [SetItem(_vars(caller), attribute, own) for attribute, own in settings.items()]


def _vars(module: nn.Module):  # type: ignore[no-untyped-def]
    return lambda: vars(module)


def reforward(sch: Node, module: nn.Module, sharding: ModuleSharding, state: Sharded) -> Edit:
    """Return the edit to install the forward for ``sharding`` in ``module``."""
    if projection_of(module) is not None:
        return Reforward(sch, module, sharding, state)
    return WrapForward(module, lambda: ShardedForward(module, sharding), sch.tree.path_of(module))


class Reforward:
    """Edit to give a sharded projection the forward for its sharding."""

    def __init__(self, sch: Node, module: nn.Module, sharding: ModuleSharding, state: Sharded) -> None:
        self.module, self.sharding = module, sharding
        self.path, self.like = sch.tree.path_of(module), state.received(module)
        self._set: SetSpecializations | None = None

    def apply(self) -> None:
        """Make the graph, with the parameters sharded by now, and install it."""
        if self._set is None:
            made = sharded_specializations(self.module, self.sharding, self.like)
            self._set = SetSpecializations(self.module, made, self.path)
        self._set.apply()

    def revert(self) -> None:
        """Restore the previous forward."""
        if self._set is not None:
            self._set.revert()
