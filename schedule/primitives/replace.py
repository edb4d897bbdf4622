"""``replace`` and ``replace_all``: replacement of modules by modules, or of matches by a function or module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from schedule.core import history
from schedule.core.edits import AddModule, SetItem, SwapModule
from schedule.core.history import Edit
from schedule.core.matching import Match, Wanted, named_matches
from schedule.patterns import GraphMatch
from schedule.patterns.rewriting import Build
from schedule.primitives.annotate import tags_carried
from schedule.primitives.callees import Named
from schedule.primitives.hooked_calls import hooks_shared
from schedule.primitives.interface import call_arguments, refuse_other_interface
from schedule.primitives.registry import primitive
from schedule.primitives.rewrites import PatternRewrite, Replacement, checked_name, rewrite_matches
from schedule.primitives.splicing import MatchGroup, refuse_foreign
from schedule.util.errors import MatchError, NotApplicable

if TYPE_CHECKING:
    from schedule.core.node import Node

Make = Callable[[str, nn.Module], nn.Module]
Which = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


@primitive
def replace(
    sch: Node,
    new: nn.Module | Callable[..., Any],
    matches: Sequence[Match | Sequence[Match]] | str | None = None,
    name: str | None = None,
) -> Node:
    """Replace this module by ``new``, or each match by one call of ``new``.

    The whole module::

        before:  self.attn = Attention(…)          after:  self.attn = new

    Forward and backward hooks move to the new module, tied weights stay tied, and ``sch`` refers to the new module.

    Vertical: a chain becomes one call::

        before:  y = x + bias;  z = F.gelu(y)      after:  z = new(x, bias)

    Horizontal: parallel chains from one input become one call with several results
    (``replace(new, sch.find_parallel(pattern))``)::

        before:  q = F.linear(x, wq);  k = F.linear(x, wk)      after:  q, k = new(x, wq, wk)

    ``new`` gets the inputs of the pattern, by name if it has parameters of all their names, else in order; and
    constants by keyword if it takes them. Inputs not shared by parallel matches are passed as ``name_0``,
    ``name_1``, …. Afterwards ``sch.history[-1].replaced`` has the nodes that were replaced.

    A matched layer may have forward pre-hooks and full backward hooks if ``new`` is a module that gets the layer's
    inputs, and nothing else in the match reads them. Then both have these hooks: calls of the graph run them on
    ``new``, with the gradients of its inputs and outputs; calls of the original forward run them on the layer; and a
    handle removes a hook from both.

    Args:
        new: a module; with matches also a function, which may return several results. A module given for
            matches becomes a child of the matched module.
        matches: result of ``find``, the name of a rule, or groups of parallel matches.
        name: with matches, the name of the new node in the graph, and of ``new`` as a child if it is a module; by
            default the function's name, or ``scheduled_`` and the class. A name that is taken gets a number.

    Raises:
        NotApplicable: the signatures differ; the module is the root; ``new`` is part of the model already; ``name`` is
            no identifier, or given for a whole module, which keeps its path; or the module is inlined in another
            module's graph.
        MatchError: as for :meth:`fuse`.
    """
    if matches is None:
        if name is not None:
            raise NotApplicable(f"{sch.label} keeps its path, so {name!r} names nothing", fix="leave out name=")
        _replace_module(sch, new)
        return sch
    found = named_matches([sch], matches)
    groups = [[item] if isinstance(item, Match) else list(item) for item in found]
    target = _Replacement(new, groups, checked_name(name))
    refuse_foreign(sch, groups)
    target.add_to(sch)
    rewrite_matches(sch, groups, target.rewrite)
    return sch


@primitive
def replace_all(sch: Node, which: Which, make: Make) -> list[str]:
    """Replace all modules below this one selected by type or predicate.

    ::

        sch.replace_all(nn.Dropout, lambda path, module: FasterDropout(module.p))

    Modules inside a selected one are left alone, and so are those returned unchanged by ``make``.

    Args:
        which: type, types, or a predicate ``which(path, module)``.
        make: ``make(path, module)`` returns the replacement; called once for a shared module.

    Returns:
        the paths of the modules replaced.

    Raises:
        NotApplicable: no module is selected or replaced, or a replacement does not fit; see :meth:`replace`.
    """
    node_of = sch.tree.node
    chosen: dict[str, nn.Module] = {}
    for path, module in sch.module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in chosen)
        if path and not inside and _is_meant(which, path, module):
            chosen[path] = module
    if not chosen:
        raise NotApplicable(f"no module in {sch.label} is a {_kind(which)}", fix="see sch.show() for what there is")
    replaced = []
    for path, module in chosen.items():
        new = make(path, module)
        history.reached("after make")
        if new is not module:
            _replace_module(node_of(module), new)
            replaced.append(path)
    if not replaced:
        raise NotApplicable(
            f"make returned each of the {len(chosen)} modules itself",
            fix="return a new module for those to be replaced",
        )
    return replaced


def _is_meant(which: Which, path: str, module: nn.Module) -> bool:
    if isinstance(which, (type, tuple)):
        return isinstance(module, which)
    return bool(which(path, module))


def _kind(which: Which) -> str:
    types = which if isinstance(which, tuple) else (which,)
    return " or ".join(getattr(kind, "__name__", "match of the predicate") for kind in types)


# -- whole modules ------------------------------------------------------------------------------------------


def _replace_module(sch: Node, new: Any) -> None:
    if not isinstance(new, nn.Module):
        raise NotApplicable(
            f"a module is replaced by a module, not by {type(new).__name__}",
            fix="a function needs matches too",
        )
    if not sch.path:
        raise NotApplicable("the root cannot be replaced", fix="schedule.create_schedule(new)")
    sch.refuse_inside_other_graph()
    old = sch.module
    if any(new is module for module in sch.tree.root.modules()):
        raise NotApplicable("the replacement is part of the model already", fix="give a module of its own")
    _refuse_state_below(sch, new)
    graphs = sch.tree.graphs
    calls = graphs.calls(old) if graphs.batch is not None else ()
    refuse_other_interface(old, new, calls)
    edits: list[Edit] = [*_restored_ties(sch, old, new), SwapModule(sch.tree, old, new)]
    for name, tensor in new.named_parameters(remove_duplicate=False):
        edits += tags_carried(sch.tree, f"{sch.path}.{name}", tensor)
    sch.commit(edits)


def _refuse_state_below(sch: Node, new: nn.Module) -> None:
    """Raise if ``new`` contains the old module's ancestor, since the tree would then be cyclic."""
    inside = set(sch.module.modules())
    if any(module in inside for module in new.modules()):
        above = {m for m, _ in sch.tree.ancestors(sch.path)}
        if above & set(new.modules()):
            raise NotApplicable("the replacement holds a module that holds it", fix="give a module of its own")


def _restored_ties(sch: Node, old: nn.Module, new: nn.Module) -> list[Edit]:
    """Return edits to tie parameters of ``new`` to other modules, as those of the same name in ``old`` are."""
    inside = set(old.modules())
    shared = {
        id(parameter)
        for module in sch.tree.root.modules()
        if module not in inside
        for parameter in module._parameters.values()
        if parameter is not None
    }
    edits: list[Edit] = []
    for name, parameter in old.named_parameters(remove_duplicate=False):
        if id(parameter) not in shared:
            continue
        owner_path, _, own_name = name.rpartition(".")
        owner = _module_at(new, owner_path)
        twin = owner._parameters.get(own_name) if owner is not None else None
        if owner is None or twin is None or twin is parameter:
            continue
        if twin.shape != parameter.shape:
            raise NotApplicable(
                f"{name} is tied to another module's parameter of shape {list(parameter.shape)}, "
                f"the replacement's has {list(twin.shape)}",
                fix="give the replacement's parameter the same shape, or untie the weights first",
            )
        table = owner._parameters
        edits.append(SetItem(lambda table=table: table, own_name, parameter))  # type: ignore[misc]
    return edits


def _module_at(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _calling(function: Callable[..., Any], callee: Any, name: str) -> Build:
    """Return a builder for a call of a function, or of a child module by its name."""

    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        args, kwargs = call_arguments(function, name, inputs, scalars)
        op = "call_module" if isinstance(callee, str) else "call_function"
        return graph.create_node(op, callee, args, kwargs)

    return build


class Replacing(PatternRewrite):
    """Each match, or each group of parallel matches, as a call of a function or of a child module."""

    def __init__(
        self, wanted: Wanted, sizes: frozenset[int], callee: Any, callee_name: str, node_name: str = ""
    ) -> None:
        super().__init__(wanted, sizes, node_name)
        self.callee, self.callee_name = callee, callee_name

    def settings(self) -> tuple[Any, ...]:
        """Return the sizes of the groups of matches, the target of the call, and the name of the nodes."""
        return self.sizes, self.callee, self.callee_name, self.node_name

    def replacement(self, graph_match: GraphMatch, module: nn.Module) -> Replacement:
        """Return the match, and a call with the inputs and scalars of the pattern."""
        callee = self.callee
        if isinstance(callee, str):
            function = module.get_submodule(callee).forward
        else:
            function = callee.function if isinstance(callee, Named) else callee
        return graph_match, _calling(function, callee, self.callee_name)


# -- matches ------------------------------------------------------------------------------------------------


class _Replacement:
    """Call target inserted in place of matches."""

    def __init__(self, new: Any, groups: Sequence[MatchGroup], node_name: str) -> None:
        if not callable(new):
            raise NotApplicable(f"{type(new).__name__} cannot be called", fix="give a function or a module")
        self.new, self.groups, self.node_name = new, groups, node_name
        self.is_module = isinstance(new, nn.Module)
        self.name = getattr(new, "__name__", type(new).__name__)
        has_name = hasattr(new, "__name__") and hasattr(new, "__module__") and new.__name__ != "<lambda>"
        self.target = new if has_name else Named(new, "replacement" if self.name == "<lambda>" else self.name)
        if self.is_module and len(groups) > 1 and any(True for _ in new.parameters()):
            raise NotApplicable(
                f"one module with parameters cannot replace {len(groups)} matches",
                fix="replace one match at a time, each by a module of its own",
            )

    def child_name(self, parent: nn.Module) -> str:
        """Return an unused name for the module as a child of ``parent``."""
        name = stem = self.node_name or f"scheduled_{self.name.lower()}"
        number = 1
        while getattr(parent, name, self.new) is not self.new:
            name, number = f"{stem}_{number}", number + 1
        return name

    def callee(self, parent: nn.Module) -> Any:
        """Return the call target in the graph of ``parent``: the function, or the name of the child."""
        return self.child_name(parent) if self.is_module else self.target

    def rewrite(self, node: Node, wanted: Wanted, sizes: frozenset[int]) -> Replacing:
        """Return the rewrite of the matches of a module."""
        return Replacing(wanted, sizes, self.callee(node.module), self.name, self.node_name)

    def add_to(self, sch: Node) -> None:
        """Add the replacement, if it is a module, as a child of every module with a match."""
        if not self.is_module:
            return
        for node in dict.fromkeys(group[0].schedule for group in self.groups):
            if any(self.new is module for module in node.module.modules()):
                raise MatchError("the replacement is part of the matched module already", fix="give another module")
            edits = [AddModule(sch.tree, node.module, self.child_name(node.module), self.new)]
            node.commit([*edits, *hooks_shared([m for group in self.groups for m in group], self.new)], 0)
