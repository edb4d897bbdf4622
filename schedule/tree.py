"""The schedule of a model: one node for each module, with paths, globs, and the primitives as methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from schedule import primitives
from schedule.errors import NotApplicable, PathError, ScheduleError, did_you_mean
from schedule.graphs import Graphs
from schedule.group import Group
from schedule.history import Edit, History, Step
from schedule.matching import Match
from schedule.primitives.registry import registered, reserve
from schedule.recipes.building import recipe_of
from schedule.recipes.recipe import Recipe
from schedule.recipes.recording import recorded
from schedule.show import rendered_tree
from schedule.tracing.specialisation import Specialisation, original_class
from schedule.util.files import refuse_unwritable
from schedule.util.globs import is_glob, select
from schedule.util.printing import printed

if TYPE_CHECKING:
    from schedule.pictures.page import Page


class Tree:
    """What the nodes of one schedule share.

    Attributes:
        root: the model.
        history: the applied primitives.
        graphs: the traced modules.
        annotations: (path of the parameter, tag) → value.
        mesh: the device mesh that ``shard`` and ``sync`` use, if any.
    """

    def __init__(self, root: nn.Module, example_inputs: Any, mesh: Any = None) -> None:
        self.root, self.mesh = root, mesh
        self.history = History(partial(recorded, self))
        self.graphs = Graphs(root, example_inputs, self.path_of)
        self.annotations: dict[tuple[str, str], Any] = {}
        self._nodes: dict[nn.Module, Schedule] = {}
        self._paths: dict[nn.Module, str] = {}

    def node(self, module: nn.Module) -> Schedule:
        """The node of ``module``; always the same one."""
        if module not in self._nodes:
            self._nodes[module] = Schedule(self, module)
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
            if any(relative in made.entered for made in self.graphs.current(ancestor) or ()):
                return ancestor, relative
        return None


def _moved(step: Step, way: str, module: nn.Module) -> bool:
    """Whether an edit of ``step`` put in (``new``, ``child``) or took out (``old``) a module that holds ``module``."""
    moved = [getattr(edit, way, None) for edit in step.edits]
    return any(isinstance(each, nn.Module) and any(module is inner for inner in each.modules()) for each in moved)


class Schedule:
    """One module of a model, and what can be done to it.

    Made by :func:`create_schedule`; ``sch["transformer.h.0.mlp"]`` is the schedule of a submodule and
    ``sch["transformer.h.*.mlp"]`` a :class:`Group` of them.
    """

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
    def root(self) -> Schedule:
        """The schedule of the whole model."""
        return self.tree.node(self.tree.root)

    @property
    def parent(self) -> Schedule | None:
        """The schedule of the module that holds this one; None for the root."""
        path = self.path
        return self.tree.node(self.tree.root.get_submodule(path.rpartition(".")[0])) if path else None

    @property
    def mesh(self) -> Any:
        """The device mesh of the schedule, or None."""
        return self.tree.mesh

    def __getitem__(self, path: str) -> Any:
        """The schedule at ``path`` under this module; for a glob, the group of all that match.

        ``*`` stands for one component of the path (or part of it), ``**`` for any number of them.

        Raises:
            PathError: there is none; names the nearest paths.
        """
        if not isinstance(path, str):
            raise PathError(f"a path is a string, not {type(path).__name__}", fix='sch["encoder.layer.0"]')
        if is_glob(path):
            found = select(self._module, path)
            if not found:
                raise self._unknown(path)
            return Group([self.tree.node(module) for module in found], f"{self.path}.{path}".lstrip("."))
        try:
            return self.tree.node(self._module.get_submodule(path))
        except AttributeError:
            raise self._unknown(path) from None

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
            self[path]
        except PathError:
            return False
        return True

    def named_schedules(self) -> Iterator[tuple[str, Schedule]]:
        """(path from here, schedule) of this module and all below; a shared module once."""
        for name, module in self._module.named_modules():
            yield name, self.tree.node(module)

    def __iter__(self) -> Iterator[Schedule]:
        raise TypeError("a Schedule is not a sequence: use named_schedules(), or a glob for a group of modules")

    # -- its graphs --------------------------------------------------------------------------------------

    @property
    def specialisations(self) -> tuple[Specialisation, ...]:
        """One graph for each recorded signature and training flag; traced when first read.

        Raises:
            TraceError: the module cannot be traced.
        """
        return self.tree.graphs.of(self._module)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph of the first recorded call in training, or in evaluation if only that can be traced."""
        return max(self.specialisations, key=lambda made: made.training).graph

    # -- history -----------------------------------------------------------------------------------------

    @property
    def history(self) -> tuple[Step, ...]:
        """The applied steps of the whole schedule, oldest first."""
        return self.tree.history.steps

    def undo(self) -> Schedule:
        """Revert the last step of the whole schedule, to the bit."""
        self.tree.history.undo()
        return self

    def redo(self) -> Schedule:
        """Apply the step that was undone last once more."""
        self.tree.history.redo()
        return self

    def recipe(self, singly: bool = False) -> Recipe:
        """What was done to the whole model, as data that another model can be scheduled by.

        Steps that were undone are not in it. What was done to all layers alike is written for all layers, so that it
        replays on a model with more or fewer of them.

        Args:
            singly: ``optimize`` as the single fuses that it made, in place of its rules.

        Raises:
            RecipeError: an argument cannot be written down, such as a lambda or a module with weights.
        """
        return recipe_of(self.tree, singly)

    def commit(self, edits: Sequence[Edit], places: int = 1) -> None:
        """Change the model, from within a primitive."""
        self.tree.history.apply(edits, self.path, places)

    def holds(self, match: Match) -> bool:
        """Whether ``match`` is in this module or below."""
        return match.schedule.tree is self.tree and f"{match.path}.".startswith(f"{self.path}." if self.path else "")

    def refuse_inside_other_graph(self) -> None:
        """Raise if this module's forward is no longer called, since another's graph holds its inside."""
        held = self.tree.holder(self.path)
        if held is not None:
            owner = self.tree.node(held[0])
            raise NotApplicable(
                f"{self.path} is in the middle of the graph of {owner.label}",
                fix=f"apply the primitive to {owner.label}, or trace that with leaves=({held[1]!r},)",
            )

    # -- showing -----------------------------------------------------------------------------------------

    def show(self, depth: int | None = None) -> None:
        """Print the modules as a tree: path, class, and what was done to each.

        Args:
            depth: how many levels; all of them if None.
        """
        print(printed(rendered_tree(self, depth)), end="")

    def show_graph(self, path: str | Path | None = None) -> Page:
        """Draw the modules and their graphs, before and after what was done, as one page for a browser.

        ::

            sch.show_graph("out.html")      # or sch.show_graph() in a notebook

        Click a module to see its graphs side by side; nodes are coloured by the rule or primitive that took them. The
        page also has the bytes that each module saves for backward, pipeline stages, the shares of ranks, and what the
        default rules leave alone and why. It needs nothing from elsewhere. Modules are traced and measured now.

        Args:
            path: where to write the page; the file is there as a whole or not at all.

        Raises:
            NotApplicable: ``path`` cannot be written, found out before any work; or the model refuses its inputs.
        """
        from schedule.html import schedule_page  # jinja2 is loaded when first needed

        if path is not None:
            refuse_unwritable(Path(path), "page")
        page = schedule_page(self)
        if path is not None:
            page.save(path)
        return page

    def _repr_html_(self) -> str:
        from schedule.html import tree  # jinja2 is loaded when first needed

        return tree(self)

    def __repr__(self) -> str:
        return f"Schedule({self.label}: {original_class(self._module).__name__})"

    # -- primitives --------------------------------------------------------------------------------------

    trace = primitives.trace
    trace_until = primitives.trace_until
    find = primitives.find
    find_parallel = primitives.find_parallel
    fuse = primitives.fuse
    replace = primitives.replace
    replace_all = primitives.replace_all
    decompose = primitives.decompose
    annotate = primitives.annotate
    checkpoint = primitives.checkpoint
    fork_rng = primitives.fork_rng
    cut_pipeline_stage = primitives.cut_pipeline_stage
    shard = primitives.shard
    sync = primitives.sync
    shard_plan = primitives.shard_plan
    apply_plan = primitives.apply_plan

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A primitive that a user registered."""
        method = None if name.startswith("_") else registered().get(name)
        if method is None:
            raise AttributeError(f"{type(self).__name__} has no attribute or primitive {name!r}")
        return method.__get__(self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *registered()]


reserve([*vars(Schedule), *vars(Group)])


def create_schedule(model: nn.Module, example_inputs: Any = None, mesh: Any = None) -> Schedule:
    """The schedule of ``model``: nothing is run or changed yet.

    Args:
        model: any module; one that was scheduled before goes on from there.
        example_inputs: what it is called with: a dict of keyword arguments, a tuple of positional ones, or
            one tensor. Made from the model by :func:`~schedule.examples.example_inputs` when something is traced,
            if not given. Sizes are not baked in.
        mesh: a ``DeviceMesh`` for ``shard`` and ``sync``.

    Raises:
        ScheduleError: ``model`` is not a module, or :func:`torch.compile` has wrapped it or a part of it.
    """
    if not isinstance(model, nn.Module):
        raise ScheduleError(
            f"a schedule is made of an nn.Module, not of {type(model).__name__}", fix="create_schedule(model)"
        )
    for path, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise NotApplicable(
                "what torch.compile has compiled cannot be rewritten any more",
                where=f"{path or 'the model itself'} is compiled",
                fix="schedule the model first, then torch.compile(model)",
            )
    return Tree(model, example_inputs, mesh).node(model)
