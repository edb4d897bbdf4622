"""The changes that ``shard`` makes besides graphs and attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from schedule.distributed.tensor_parallel.parameters import LoadWhole, ShardedTensor

if TYPE_CHECKING:
    from schedule.core.node import Tree


class ShardParameter:
    """A parameter becomes a DTensor, under every name it has. The whole one keeps its memory until freed."""

    def __init__(self, tensor: ShardedTensor) -> None:
        self.tensor = tensor

    def apply(self) -> None:
        """Shard it."""
        self.tensor.shard()

    def revert(self) -> None:
        """Put the whole parameter back; where its memory was freed, all ranks gather it."""
        self.tensor.gather()


class FreeWhole:
    """The last change of a shard: the whole parameter's memory is let go."""

    def __init__(self, tensor: ShardedTensor) -> None:
        self.tensor = tensor

    def apply(self) -> None:
        """Free it."""
        self.tensor.free()

    def revert(self) -> None:
        """Nothing: :class:`ShardParameter` gathers it."""


class ConvertOnLoad:
    """A module with sharded parameters takes whole tensors from a ``state_dict``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._handle: RemovableHandle | None = None

    def apply(self) -> None:
        """Register the conversion."""
        self._handle = self.module.register_load_state_dict_pre_hook(LoadWhole())

    def revert(self) -> None:
        """Remove it."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class ForgetRun:
    """What was recorded and traced before no longer holds: the model is run again when a graph is needed."""

    def __init__(self, tree: Tree, modules: Iterable[nn.Module]) -> None:
        self.graphs, self.modules = tree.graphs, affected(tree, modules)
        self._before: dict[str, Any] | None = None

    def apply(self) -> None:
        """Forget."""
        self._before = self.graphs.forget_run(self.modules)

    def revert(self) -> None:
        """Remember again."""
        if self._before is not None:
            self.graphs.remember_run(self._before)
            self._before = None


def affected(tree: Tree, modules: Iterable[nn.Module]) -> set[nn.Module]:
    """``modules`` and everything above them, wherever they are."""
    wanted = set(modules)
    found = set(wanted)
    for path, module in tree.root.named_modules(remove_duplicate=False):
        if module in wanted:
            found.update(ancestor for ancestor, _ in tree.ancestors(path))
    return found
