"""State shared by the sharded modules of one schedule: the mesh and the recording of the whole model."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from schedule.capture import Call, Recording, Specialization, TensorSpec
from schedule.distributed.communication.mesh import TensorParallel, tensor_parallel
from schedule.distributed.tensor_parallel.output_propagation import follow
from schedule.distributed.tensor_parallel.sharded_modules import COLUMN, ModuleSharding, Split, sharding_of
from schedule.distributed.tensor_parallel.size_settings import whole_forward
from schedule.util.errors import ShardError, TraceError

if TYPE_CHECKING:
    from schedule.core.node import Tree

_states: weakref.WeakKeyDictionary[Tree, Sharded] = weakref.WeakKeyDictionary()


def sharded_state(tree: Tree) -> Sharded:
    """Return the shared state of ``tree``, creating it on first use.

    Raises:
        ShardError: the schedule has no mesh, or the mesh cannot be used.
    """
    if tree not in _states:
        _states[tree] = Sharded(tree)
    return _states[tree]


class Sharded:
    """Tensor-parallel state of one schedule.

    Attributes:
        tp: the tensor-parallel ranks.
        whole: the run recorded before anything was sharded; None without example inputs.
        gathered: paths of modules whose outputs are about to be gathered, so that no sizes depend on their shard.
    """

    def __init__(self, tree: Tree, tp: TensorParallel | None = None) -> None:
        self.tp: TensorParallel = tensor_parallel(tree.mesh) if tp is None else tp
        self._tree = weakref.ref(tree)
        self.whole: Recording | None = None
        self.gathered: frozenset[str] = frozenset()
        self._callers: dict[nn.Module, Specialization | TraceError] = {}

    @property
    def tree(self) -> Tree:
        """Tree of the schedule, held by a weak reference."""
        tree = self._tree()
        if tree is None:
            raise ShardError("the schedule is gone")
        return tree

    @property
    def recording(self) -> Recording:
        """The run recorded before anything was sharded.

        Raises:
            ShardError: there is none.
        """
        if self.whole is None:
            raise ShardError("a plan needs a recorded run", fix="create_schedule(model, batch=batch)")
        return self.whole

    @property
    def whole_calls(self) -> dict[nn.Module, list[Call]]:
        """Calls of each module in the recorded run of the whole model, empty without one."""
        return {} if self.whole is None else self.whole.calls

    def remember_whole(self, module: nn.Module) -> None:
        """Record the whole model unless a module is sharded already, and trace the caller of ``module``.

        Both are needed later: the sizes that depend on a shard are found in the original forward.
        """
        tree = self.tree
        whole = not any(sharding_of(one) for one in tree.root.modules())
        if whole and tree.graphs.batch is not None:
            tree.graphs.calls(module)  # records anew if modules were exchanged
            if self.whole is not tree.graphs.recording:
                self.whole = tree.graphs.recording
                self._callers.clear()
        caller = self.caller_of(tree.path_of(module))
        if caller is not None:
            self.whole_forward(caller[0])

    def received(self, module: nn.Module) -> TensorSpec | None:
        """Return the spec of the first tensor passed to ``module`` in the recorded run, or None.

        In a module that runs on parts of the sequence, it has this rank's part of the dimension before the last.
        """
        calls = self.whole_calls.get(module)
        if not calls:
            return None
        given = [*calls[0].args, *calls[0].kwargs.values()]
        spec = next((leaf for leaf in given if isinstance(leaf, TensorSpec)), None)
        above = (sharding_of(ancestor) for ancestor, _ in self.tree.ancestors(self.tree.path_of(module)))
        if spec is None or not any(one is not None and one.context is not None for one in above):
            return spec
        return replace(spec, shape=(*spec.shape[:-2], spec.shape[-2] // self.tp.size, spec.shape[-1]))

    def caller_of(self, path: str) -> tuple[nn.Module, str] | None:
        """Return the nearest ancestor of ``path`` called in the recorded run, and the relative path from it."""
        if self.whole is None:
            return None
        for ancestor, relative in self.tree.ancestors(path):
            if self.whole.calls.get(ancestor):
                return ancestor, relative
        return None

    def whole_forward(self, caller: nn.Module) -> Specialization | TraceError:
        """Return the traced whole forward of ``caller``, or the error of tracing it."""
        if caller not in self._callers:
            if self.whole is None or not self.whole.calls.get(caller):
                return TraceError(
                    "it was not called in a recorded run",
                    fix="create_schedule(model, batch=batch, mesh=mesh), with inputs that reach it",
                )
            try:
                self._callers[caller] = whole_forward(caller, self.whole)
            except TraceError as error:
                self._callers[caller] = error
        return self._callers[caller]

    def settings(self, module: nn.Module, path: str, split: Split) -> tuple[nn.Module, dict[str, int]] | None:
        """Return the caller of ``module`` and the per-rank values of its attributes affected by sharded outputs.

        Return None if no caller was recorded or traced, or if the outputs are gathered.

        Raises:
            ShardError: the caller cannot work on sharded outputs, or packed parts cannot be followed.
        """
        found = None if path in self.gathered else self.caller_of(path)
        if found is None:
            if split.parts > 1:
                raise ShardError(
                    "packed outputs are followed through a recorded run, and there is none",
                    fix="create_schedule(model, batch=batch, mesh=mesh)",
                )
            return None
        caller, relative = found
        traced = self.whole_forward(caller)
        if isinstance(traced, TraceError):
            if split.parts > 1:
                raise ShardError(f"packed outputs cannot be followed: {traced.why}", fix=traced.fix)
            return None
        shared = {relative: split}
        for name, child in caller.named_modules():
            sharding = sharding_of(child)
            if sharding is not None and sharding.role(child) == COLUMN and "fwd_post" not in sharding.syncs:
                shared[name] = sharding.splits["weight"]
        columns = {name: one.parts for name, one in shared.items()}
        replicas = {name: one.replicas for name, one in shared.items()}
        common = {name: one.common for name, one in shared.items()}
        followed = follow(traced.graph, caller, columns, self.tp.size, replicas, common)
        return caller, {name: own for name, (_, own) in followed.items()}


def fresh_sharding(module: nn.Module, tp: TensorParallel) -> ModuleSharding:
    """Return the current sharding of ``module``, or a new one without splits.

    Raises:
        ShardError: the module is sharded over another mesh.
    """
    sharding = sharding_of(module) or ModuleSharding(tp.group, tp.size)
    if (sharding.group, sharding.ranks) != (tp.group, tp.size):
        raise ShardError(
            f"it is sharded over the group {sharding.group!r} of {sharding.ranks} ranks, and this schedule's "
            f"mesh has {tp.group!r} of {tp.size}",
            fix="use one mesh for all shards",
        )
    return sharding
