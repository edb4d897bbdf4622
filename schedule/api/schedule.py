"""Schedule of a model: one node per module, with paths, globs, and the primitives as methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule import primitives
from schedule.core.node import Node, Tree
from schedule.distributed.tensor_parallel.sharded_modules import is_sharded
from schedule.optimizer import optimize, survey
from schedule.primitives.group import Group
from schedule.primitives.registry import registered, reserve
from schedule.recipes.building import recipe_of
from schedule.recipes.recipe import Recipe
from schedule.recipes.step_recording import recorded
from schedule.report.pages import schedule_page, tree_html
from schedule.report.pictures.page import Page
from schedule.report.tree_text import rendered_tree
from schedule.util.arguments import keywords_checked
from schedule.util.errors import NotApplicable, ScheduleError, no_attribute
from schedule.util.files import refuse_unwritable
from schedule.util.globs import is_glob
from schedule.util.printing import printed


class Schedule(Node):
    """Schedule of one module, with the primitives as methods.

    Created by :func:`create_schedule`; ``sch["transformer.h.0.mlp"]`` is the schedule of a submodule and
    ``sch["transformer.h.*.mlp"]`` a :class:`Group` of them.
    """

    def __init__(self, tree: Tree, module: nn.Module | None = None) -> None:
        if not (isinstance(tree, Tree) and isinstance(module, nn.Module)):
            raise ScheduleError(
                f"a Schedule is not made by its class: Schedule({type(tree).__name__}) was called",
                fix="schedule.create_schedule(model)",
            )
        super().__init__(tree, module)

    def __getitem__(self, path: str) -> Schedule | Group:
        """Return the schedule at ``path`` under this module, or the group of all matches of a glob.

        ``*`` stands for one component of the path (or part of it), ``**`` for any number of components.

        Raises:
            PathError: no module matches. The message names the nearest paths.
        """
        found = self.select(path)
        return Group(found, f"{self.path}.{path}".lstrip(".")) if is_glob(path) else found[0]

    def __iter__(self) -> Iterator[Schedule]:
        raise TypeError("a Schedule is not a sequence: use named_schedules(), or a glob for a group of modules")

    def recipe(self, singly: bool = False) -> Recipe:
        """Return all steps on the whole model as data, to replay on another model.

        Undone steps are left out. A step applied to all layers alike is recorded for all layers, so it replays on a
        model with more or fewer layers.

        Args:
            singly: record each fuse made by ``optimize`` instead of its rules.

        Raises:
            RecipeError: an argument cannot be serialized, such as a lambda or a module with weights.
        """
        return recipe_of(self.tree, singly)

    # -- showing -----------------------------------------------------------------------------------------

    def show(self, depth: int | None = None) -> None:
        """Print the modules as a tree with paths, classes and applied primitives.

        Args:
            depth: the number of levels; all levels if None.
        """
        print(printed(rendered_tree(self, depth)), end="")

    def show_graph(self, path: str | Path | None = None) -> Page:
        """Draw the modules and their graphs, before and after scheduling, as one HTML page.

        ::

            sch.show_graph("out.html")      # or sch.show_graph() in a notebook

        Click a module to see its graphs side by side; nodes are colored by the rule or primitive that rewrote them. The
        page also shows the bytes that each module saves for backward, the pipeline stages, the shards of each rank, and
        the call sites that the default rules leave alone, with reasons. The page is self-contained. Modules are traced
        and measured by this call.

        Args:
            path: file to write the page to, atomically.

        Raises:
            NotApplicable: ``path`` cannot be written (checked before any work), or the model rejects its inputs.
        """
        if path is not None:
            refuse_unwritable(Path(path), "page")
        page = schedule_page(self, [] if is_sharded(self.tree.root) else survey(self))
        if path is not None:
            page.save(path)
        return page

    def _repr_html_(self) -> str:
        return tree_html(self)

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
    shard_experts = primitives.shard_experts
    sync = primitives.sync
    context_parallel = primitives.context_parallel
    shard_plan = primitives.shard_plan
    apply_plan = primitives.apply_plan
    optimize = optimize

    if not TYPE_CHECKING:  # else a misspelled primitive would not be an error

        def __getattr__(self, name: str) -> Callable[..., Any]:
            """Return a primitive registered by a user."""
            method = None if name.startswith("_") else registered().get(name)
            if method is None:
                raise no_attribute(self, name, registered())
            return method.__get__(self)

    def __dir__(self) -> list[str]:
        return sorted(name for name in {*super().__dir__(), *registered()} if not name.startswith("_"))


reserve([*vars(Node), *vars(Schedule), *vars(Group)])


@keywords_checked(example_inputs="batch")
def create_schedule(model: nn.Module, batch: Any = None, mesh: Any = None) -> Schedule:
    """Create the schedule of ``model`` without running or changing the model.

    Args:
        model: any module; scheduling continues on a module that was scheduled before.
        batch: inputs of the model: a dict of keyword arguments, a tuple of positional arguments, or
            one tensor. By default, made from the config of the model, or its ``dummy_inputs``, when something is traced
            (:mod:`schedule.batches`). Sizes are not baked in.
        mesh: a ``DeviceMesh`` for ``shard`` and ``sync``.

    Raises:
        ScheduleError: ``model`` is not a module, or :func:`torch.compile` has wrapped it or a part of it.
    """
    if not isinstance(model, nn.Module):
        load = f"AutoModel.from_pretrained({model!r})" if isinstance(model, str) else "create_schedule(model)"
        raise ScheduleError(f"a schedule is made of an nn.Module, not of {type(model).__name__}", fix=load)
    for path, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise NotApplicable(
                "what torch.compile has compiled cannot be rewritten any more",
                where=f"{path or 'the model itself'} is compiled",
                fix="schedule the model first, then torch.compile(model)",
            )
    made: Schedule = Tree(model, batch, mesh, Schedule, recorded).node(model)
    return made
