"""Modules of one model as nodes, with their paths, graphs and history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary, ref

from torch import fx, nn

from schedule.capture import Specialization, original_class
from schedule.core.graphs import Graphs
from schedule.core.history import Edit, History, Step
from schedule.runtime.scheduled import states_in
from schedule.util.arguments import refuse_no_count
from schedule.util.errors import NotApplicable, PathError, did_you_mean
from schedule.util.globs import is_glob, select
from schedule.util.named_values import batch_text
from schedule.util.wording import counted

NodeT = TypeVar("NodeT", bound="Node")

_TREES: WeakKeyDictionary[nn.Module, list[ref[Tree]]] = WeakKeyDictionary()
"""Model → its schedules; a model does not keep them alive."""


class Tree:
    """State shared by the nodes of one schedule.

    Attributes:
        root: the model.
        history: the applied primitives.
        graphs: the graphs of the modules.
        annotations: (path of the parameter, tag) → value.
        mesh: the device mesh that ``shard`` and ``sync`` use, if any.
        stage_ends: the modules after which a pipeline stage ends, in the order they were named.
        verified: the steps that were verified last, and the result.

    Args:
        node: class of the nodes.
        record: describes a call of a primitive before it is made; see :class:`History`.
    """

    def __init__(self, root: nn.Module, batch: Any, mesh: Any, node: type[Node], record: Callable[..., Any]) -> None:
        self.root, self.mesh, self._node = root, mesh, node
        self.history = History(partial(record, self))
        self.graphs = Graphs(root, batch, self.path_of)
        self.annotations: dict[tuple[str, str], Any] = {}
        self.stage_ends: dict[nn.Module, bool] = {}
        self.verified: tuple[tuple[Step, ...], Any] | None = None
        self._nodes: dict[nn.Module, Any] = {}
        self._paths: dict[nn.Module, str] = {}
        _TREES[root] = [*(alive for alive in _TREES.get(root, ()) if alive() is not None), ref(self)]

    def use_batch(self, batch: Any) -> None:
        """Record with ``batch`` from now on; None keeps the one there is, or makes one from the model.

        Raises:
            NotApplicable: steps were applied to graphs of a batch with other shapes or dtypes.
        """
        now = self.graphs.batch
        if batch is not None and (now is None or batch_text(now) != batch_text(batch)):
            if self.history.steps and self.graphs.made_recording is not None:
                raise NotApplicable(
                    f"this schedule was recorded with {batch_text(now)}, and the batch is {batch_text(batch)}",
                    fix="leave the batch out, undo_all() first, or make another schedule with this batch",
                )
            self.graphs.restart(batch)
        self.graphs.require_batch()

    def node(self, module: nn.Module) -> Any:
        """Return the node of ``module``, always the same object."""
        if module not in self._nodes:
            self._nodes[module] = self._node(self, module)
        return self._nodes[module]

    def path_of(self, module: nn.Module) -> str:
        """Return the current path of ``module``, the first one if it is shared.

        Raises:
            PathError: it is no longer part of the model.
        """
        path = self._paths.get(module)
        if path is None or self._at(path) is not module:  # the user may change the model outside the schedule
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
        """Clear the cached paths after modules were added or removed."""
        self._paths = {}

    def moved(self, old: nn.Module, new: nn.Module, holders: Sequence[nn.Module]) -> None:
        """Move the node of ``old`` to ``new``, its replacement, and invalidate the ancestors' graphs."""
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
        """Yield each module above ``path``, nearest first, with the path relative to it."""
        parts = path.split(".") if path else []
        for depth in range(len(parts) - 1, -1, -1):
            module = self._at(".".join(parts[:depth]))
            if module is not None:
                yield module, ".".join(parts[depth:])

    def holder(self, path: str) -> tuple[nn.Module, str] | None:
        """Return the ancestor with the module at ``path`` inlined in its graph, and the relative path, or None."""
        for ancestor, relative in self.ancestors(path):
            if any(relative in made.inlined for made in self.graphs.current(ancestor) or ()):
                return ancestor, relative
        return None


def _moved(step: Step, way: str, module: nn.Module) -> bool:
    """Check whether ``step`` added (``new``, ``child``) or removed (``old``) ``module`` or a parent of it."""
    moved = [getattr(edit, way, None) for edit in step.edits]
    return any(isinstance(each, nn.Module) and any(module is inner for inner in each.modules()) for each in moved)


class Node:
    """One module of a model in a schedule, with its path, graphs and history."""

    def __init__(self, tree: Tree, module: nn.Module) -> None:
        self.tree, self._module = tree, module

    # -- where it is -------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self._module

    @property
    def path(self) -> str:
        """The path of the module in the root, such as ``transformer.h.0.mlp`` ("" for the root)."""
        return self.tree.path_of(self._module)

    @property
    def label(self) -> str:
        """The path as shown in messages."""
        return self.path or "the root"

    @property
    def root(self) -> Self:
        """The schedule of the whole model."""
        root: Self = self.tree.node(self.tree.root)
        return root

    @property
    def parent(self) -> Self | None:
        """The schedule of the parent module, or None for the root."""
        path = self.path
        return self.tree.node(self.tree.root.get_submodule(path.rpartition(".")[0])) if path else None

    @property
    def mesh(self) -> Any:
        """The device mesh of the schedule, or None."""
        return self.tree.mesh

    def at(self, path: str) -> Self:
        """Return the node at ``path`` under this module.

        Raises:
            PathError: there is no such module; suggests similar paths.
        """
        try:
            node: Self = self.tree.node(self._module.get_submodule(path))
        except AttributeError:
            raise self._unknown(path) from None
        return node

    def select(self, path: str) -> list[Self]:
        """Return the node at ``path`` under this module, or all matches of a glob.

        Raises:
            PathError: there is no such module; suggests similar paths.
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
        if not fix:  # the last part may be correct after a wrong prefix
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
        """Yield (relative path, schedule) of this module and all below, a shared module once."""
        for name, module in self._module.named_modules():
            yield name, self.tree.node(module)

    # -- its graphs --------------------------------------------------------------------------------------

    @property
    def specializations(self) -> tuple[Specialization, ...]:
        """One graph for each recorded signature and training flag, traced on first access.

        Raises:
            TraceError: the module cannot be traced.
        """
        return self.tree.graphs.of(self._module)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph of the first recorded call in training mode, or in eval mode if only eval is traceable."""
        return max(self.specializations, key=lambda made: made.training).graph

    # -- history -----------------------------------------------------------------------------------------

    @property
    def history(self) -> tuple[Step, ...]:
        """The applied steps of the whole schedule, oldest first."""
        return self.tree.history.steps

    def undo(self, steps: int = 1) -> Self:
        """Revert the last steps of the whole schedule, bit-exactly.

        Raises:
            NotApplicable: there are fewer steps; then none is reverted.
        """
        history = self.tree.history
        refuse_no_count("steps is a number", steps, 1, asked="undo", fix="undo(), or undo_all()")
        if steps > 1 and steps > (done := len(history.steps)):
            raise NotApplicable(f"only {counted(done, 'step')} can be undone", asked=f"undo({steps})", fix="undo_all()")
        with history.all_or_nothing():
            for _ in range(steps):
                history.undo()
        return self

    def undo_all(self) -> Self:
        """Revert all steps of the whole schedule, bit-exactly; the model is as it was when the schedule was made.

        Raises:
            NotApplicable: this schedule did nothing, and the model runs graphs of another one.
        """
        if not self.history and next(iter(states_in(self.tree.root)), None) is not None:
            raise NotApplicable(
                "this schedule did nothing, and another one changed the model",
                asked="undo_all",
                fix="report.schedule.undo_all(), of the report or the schedule by which it was changed",
            )
        return self.undo(len(self.history)) if self.history else self

    def redo(self) -> Self:
        """Reapply the last undone step."""
        self.tree.history.redo()
        return self

    def commit(self, edits: Sequence[Edit], matches: int = 1) -> None:
        """Apply edits to the model from within a primitive."""
        self.tree.history.apply(edits, self.path, matches)

    def refuse_inside_other_graph(self) -> None:
        """Raise if this module is inlined in another module's graph, so its forward is no longer called."""
        holder = self.tree.holder(self.path)
        if holder is not None:
            owner = self.tree.node(holder[0])
            raise NotApplicable(
                f"{self.path} is in the middle of the graph of {owner.label}",
                fix=f"apply the primitive to {owner.label}, or trace that with leaves=({holder[1]!r},)",
            )

    def __repr__(self) -> str:
        if "_module" not in vars(self):  # a traceback shows the object that its own constructor refused
            return object.__repr__(self)
        return f"{type(self).__name__}({self.label}: {original_class(self._module).__name__})"


def scheduled_root(model: nn.Module) -> Any:
    """Return the node of ``model`` in the one schedule of it that has steps.

    Raises:
        NotApplicable: there is none, none any more, or more than one.
    """
    found = [tree for alive in _TREES.get(model, ()) if (tree := alive()) is not None and tree.history.steps]
    if len(found) == 1:
        return found[0].node(model)
    name = type(model).__name__
    if found:
        raise NotApplicable(f"{len(found)} schedules changed this {name}", fix="give the schedule: verify(sch, batch)")
    raise NotApplicable(
        f"no schedule of this {name} with a step is at hand",
        fix="report = schedule.optimize(model, batch), and verify(report.schedule, batch)",
    )
