"""The modules of one model as nodes, with their paths, graphs and history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from torch import fx, nn

from schedule.capture.tracing.specialization import Specialization, original_class
from schedule.core.graphs import Graphs
from schedule.core.history import Edit, History, Step
from schedule.util.errors import NotApplicable, PathError, did_you_mean
from schedule.util.globs import is_glob, select

NodeT = TypeVar("NodeT", bound="Node")


class Tree:
    """What the nodes of one schedule share.

    Attributes:
        root: the model.
        history: the applied primitives.
        graphs: the traced modules.
        annotations: (path of the parameter, tag) → value.
        mesh: the device mesh that ``shard`` and ``sync`` use, if any.
        stage_ends: the modules after which a stage of a pipeline ends, in the order in which they were named.

    Args:
        node: makes the nodes.
        record: describes a call of a primitive before it is made; see :class:`History`.
    """

    def __init__(
        self, root: nn.Module, example_inputs: Any, mesh: Any, node: type[Node], record: Callable[..., Any]
    ) -> None:
        self.root, self.mesh, self._node = root, mesh, node
        self.history = History(partial(record, self))
        self.graphs = Graphs(root, example_inputs, self.path_of)
        self.annotations: dict[tuple[str, str], Any] = {}
        self.stage_ends: dict[nn.Module, bool] = {}
        self._nodes: dict[nn.Module, Any] = {}
        self._paths: dict[nn.Module, str] = {}

    def node(self, module: nn.Module) -> Any:
        """The node of ``module``; always the same one."""
        if module not in self._nodes:
            self._nodes[module] = self._node(self, module)
        return self._nodes[module]

    def path_of(self, module: nn.Module) -> str:
        """Where ``module`` is now; the first place if it is shared.

        Raises:
            PathError: it is no longer part of the model.
        """
        path = self._paths.get(module)
        if path is None or self._at(path) is not module:  # the user may change the model beside the schedule
            self._paths = {module: name for name, module in self.root.named_modules()}
            path = self._paths.get(module)
        if path is None:
            raise PathError(
                f"this {type(module).__name__} is no longer part of the model{self._remover(module)}",
                fix="look the module up by its path again, or undo that step",
            )
        return path

    def _at(self, path: str) -> nn.Module | None:
        module: Any = self.root
        for part in path.split(".") if path else ():
            module = module._modules.get(part)
            if module is None:
                return None
        return module

    def _remover(self, module: nn.Module) -> str:
        for step in reversed(self.history.steps):
            if _moved(step, "old", module):
                return f": {step.description} took it out"
        for step in self.history.undone:
            if _moved(step, "new", module) or _moved(step, "child", module):
                return f": {step.description}, which put it in, was undone"
        return ""

    def forget_paths(self) -> None:
        """Modules were added or removed."""
        self._paths = {}

    def moved(self, old: nn.Module, new: nn.Module, holders: Sequence[nn.Module]) -> None:
        """``new`` has taken the place of ``old``: the node follows, and the ancestors' graphs go."""
        self.forget_paths()
        node = self._nodes.pop(old, None)
        if node is not None:
            node._module = new
            self._nodes[new] = node
        outdated: set[nn.Module] = set(holders)
        for path, module in self.root.named_modules(remove_duplicate=False):
            if module is new:
                outdated.update(ancestor for ancestor, _ in self.ancestors(path))
        self.graphs.structure_changed(outdated)

    def ancestors(self, path: str) -> Iterator[tuple[nn.Module, str]]:
        """Each module above ``path``, nearest first, with the path from there."""
        parts = path.split(".") if path else []
        for depth in range(len(parts) - 1, -1, -1):
            module = self._at(".".join(parts[:depth]))
            if module is not None:
                yield module, ".".join(parts[depth:])

    def holder(self, path: str) -> tuple[nn.Module, str] | None:
        """The module whose graph holds the inside of the module at ``path``, and the path from there."""
        for ancestor, relative in self.ancestors(path):
            if any(relative in made.inlined for made in self.graphs.current(ancestor) or ()):
                return ancestor, relative
        return None


def _moved(step: Step, way: str, module: nn.Module) -> bool:
    """Whether an edit of ``step`` put in (``new``, ``child``) or took out (``old``) a module that holds ``module``."""
    moved = [getattr(edit, way, None) for edit in step.edits]
    return any(isinstance(each, nn.Module) and any(module is inner for inner in each.modules()) for each in moved)


class Node:
    """One module of a model in a schedule: where it is, its graphs, and what was done to it."""

    def __init__(self, tree: Tree, module: nn.Module) -> None:
        self.tree, self._module = tree, module

    # -- where it is -------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self._module

    @property
    def path(self) -> str:
        """Where the module is in the root, such as ``transformer.h.0.mlp``; "" is the root."""
        return self.tree.path_of(self._module)

    @property
    def label(self) -> str:
        """The path as messages write it."""
        return self.path or "the root"

    @property
    def root(self) -> Self:
        """The schedule of the whole model."""
        root: Self = self.tree.node(self.tree.root)
        return root

    @property
    def parent(self) -> Self | None:
        """The schedule of the module that holds this one; None for the root."""
        path = self.path
        return self.tree.node(self.tree.root.get_submodule(path.rpartition(".")[0])) if path else None

    @property
    def mesh(self) -> Any:
        """The device mesh of the schedule, or None."""
        return self.tree.mesh

    def at(self, path: str) -> Self:
        """The node at ``path`` under this module.

        Raises:
            PathError: there is none; names the nearest paths.
        """
        try:
            node: Self = self.tree.node(self._module.get_submodule(path))
        except AttributeError:
            raise self._unknown(path) from None
        return node

    def select(self, path: str) -> list[Self]:
        """The node at ``path`` under this module; for a glob, all that match.

        Raises:
            PathError: there is none; names the nearest paths.
        """
        if not isinstance(path, str):
            raise PathError(f"a path is a string, not {type(path).__name__}", fix='sch["encoder.layer.0"]')
        if not is_glob(path):
            return [self.at(path)]
        found: list[Self] = [self.tree.node(module) for module in select(self._module, path)]
        if not found:
            raise self._unknown(path)
        return found

    def _unknown(self, path: str) -> PathError:
        paths = [name for name, _ in self._module.named_modules() if name]
        fix = did_you_mean(path, paths, cutoff=0.5)
        if not fix:  # a wrong beginning hides a right end
            last = path.rpartition(".")[2]
            near = [name for name in paths if name.rpartition(".")[2] == last][:3]
            fix = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(self._children())}"
        matching = "no module matches" if is_glob(path) else "there is no module"
        return PathError(f"{matching} {path!r} in {self.label} ({type(self._module).__name__})", fix=fix)

    def _children(self) -> list[str]:
        return [name for name, _ in self._module.named_children()] or ["no submodules"]

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        try:
            self.select(path)
        except PathError:
            return False
        return True

    def named_schedules(self) -> Iterator[tuple[str, Self]]:
        """(path from here, schedule) of this module and all below; a shared module once."""
        for name, module in self._module.named_modules():
            yield name, self.tree.node(module)

    # -- its graphs --------------------------------------------------------------------------------------

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """One graph for each recorded signature and training flag; traced when first read.

        Raises:
            TraceError: the module cannot be traced.
        """
        return self.tree.graphs.of(self._module)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph of the first recorded call in training, or in evaluation if only that can be traced."""
        return max(self.specializations, key=lambda made: made.training).graph

    # -- history -----------------------------------------------------------------------------------------

    @property
    def history(self) -> tuple[Step, ...]:
        """The applied steps of the whole schedule, oldest first."""
        return self.tree.history.steps

    def undo(self) -> Self:
        """Revert the last step of the whole schedule, to the bit."""
        self.tree.history.undo()
        return self

    def redo(self) -> Self:
        """Apply the step that was undone last once more."""
        self.tree.history.redo()
        return self

    def commit(self, edits: Sequence[Edit], places: int = 1) -> None:
        """Change the model, from within a primitive."""
        self.tree.history.apply(edits, self.path, places)

    def refuse_inside_other_graph(self) -> None:
        """Raise if this module's forward is no longer called, since another's graph holds its inside."""
        held = self.tree.holder(self.path)
        if held is not None:
            owner = self.tree.node(held[0])
            raise NotApplicable(
                f"{self.path} is in the middle of the graph of {owner.label}",
                fix=f"apply the primitive to {owner.label}, or trace that with leaves=({held[1]!r},)",
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label}: {original_class(self._module).__name__})"
