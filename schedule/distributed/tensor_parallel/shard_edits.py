"""Edits made by ``shard`` besides those to graphs and attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from schedule.distributed.tensor_parallel.parameters import LoadWhole, ShardedTensor

if TYPE_CHECKING:
    from schedule.core.node import Tree


class ShardParameter:
    """Edit to replace a parameter by a DTensor under all its names.

    The whole parameter keeps its memory until :class:`FreeWhole` frees it.
    """

    def __init__(self, tensor: ShardedTensor) -> None:
        self.tensor = tensor

    def apply(self) -> None:
        """Shard the parameter."""
        self.tensor.shard()

    def revert(self) -> None:
        """Put the whole parameter back. If its memory was freed, all ranks gather it."""
        self.tensor.gather()


class FreeWhole:
    """Last edit of a shard, to free the memory of the whole parameter."""

    def __init__(self, tensor: ShardedTensor) -> None:
        self.tensor = tensor

    def apply(self) -> None:
        """Free the memory of the whole parameter."""
        self.tensor.free()

    def revert(self) -> None:
        """Do nothing, because :class:`ShardParameter` gathers the parameter."""


class ConvertOnLoad:
    """Edit to let a module with sharded parameters load whole tensors from a ``state_dict``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._handle: RemovableHandle | None = None

    def apply(self) -> None:
        """Register the ``load_state_dict`` pre-hook."""
        self._handle = self.module.register_load_state_dict_pre_hook(LoadWhole())

    def revert(self) -> None:
        """Remove the pre-hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class ForgetRun:
    """Edit to discard recorded calls and traces. The model runs again when a graph is needed."""

    def __init__(self, tree: Tree, modules: Iterable[nn.Module]) -> None:
        self.graphs, self.modules = tree.graphs, affected(tree, modules)
        self._before: dict[str, Any] | None = None

    def apply(self) -> None:
        """Discard the recording and the traces of the modules."""
        self._before = self.graphs.forget_run(self.modules)

    def revert(self) -> None:
        """Restore them."""
        if self._before is not None:
            self.graphs.remember_run(self._before)
            self._before = None


def affected(tree: Tree, modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return ``modules`` and all their ancestors, under every path."""
    wanted = set(modules)
    found = set(wanted)
    for path, module in tree.root.named_modules(remove_duplicate=False):
        if module in wanted:
            found.update(ancestor for ancestor, _ in tree.ancestors(path))
    return found
