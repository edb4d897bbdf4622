"""``trace`` and ``trace_until``: graphs with chosen submodules inlined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule.capture import is_basic, is_hooked
from schedule.core import history
from schedule.core.edits import SetTrace
from schedule.primitives.registry import primitive
from schedule.runtime.scheduled import state_of
from schedule.util.errors import NotApplicable, PathError, TraceError
from schedule.util.globs import is_glob, matcher

if TYPE_CHECKING:
    from schedule.core.node import Node, NodeT

Leaf = type[nn.Module] | str | Callable[[str, nn.Module], bool]


@primitive
def trace(sch: NodeT, flatten: bool = False, leaves: Sequence[Leaf] = (), recursive: bool = True) -> NodeT:
    """Trace this module's forward into FX graphs, for every recorded signature, in training and eval mode.

    ::

        flatten=False:  x = self.ln_1(h);  a = self.attn(x)
        flatten=True:   x = self.ln_1(h);  q = self.attn.c_attn(x);  …

    If a mode cannot be traced, such as training with layers dropped at random, it keeps the original forward.
    The module runs its own forward until something is rewritten. The graphs are compared with it immediately, at
    other shapes than recorded. Not needed before ``find``, which traces without flattening.

    Args:
        flatten: inline submodules. Modules of ``torch.nn`` and transformers' ``Conv1D`` stay calls, and so do
            modules rewritten already.
        leaves: further modules that stay calls: a type, a path or glob, or a predicate of path and module.
        recursive: with ``flatten``, also inline submodules of submodules.

    Raises:
        TraceError: the forward cannot be traced (gives the line and the reason), the graph is wrong at other
            shapes, or a module with a hook would be inlined, which would bypass the hook.
        NotApplicable: the module is inlined in another module's graph, or was rewritten already.
    """
    _refuse_unknown_leaves(sch, leaves)

    def enter(module: nn.Module, path: str) -> bool:
        if not flatten or (not recursive and "." in path):
            return False
        return not (is_basic(module) or state_of(module) is not None or _is_leaf(module, path, leaves))

    _keep(sch, enter)
    return sch


@primitive
def trace_until(sch: NodeT, paths: str | Sequence[str]) -> NodeT:
    """Trace this module down to the named submodules.

    These stay calls; the modules above them are inlined.

    ::

        sch.trace_until("transformer.h.0.mlp")
        →  …;  m = self.transformer.h.0.mlp(x);  h = r + m;  h1 = self.transformer.h.1(h)

    Args:
        paths: one or more paths or globs, from this module.

    Raises:
        PathError: no module has such a path.
        TraceError: as for :meth:`trace`.
    """
    wanted = [paths] if isinstance(paths, str) else list(paths)
    own = f"{sch.path}." if sch.path else ""
    targets = [node.path.removeprefix(own) for path in wanted for node in sch.select(path)]
    above = {".".join(parts[:depth]) for parts in (t.split(".") for t in targets) for depth in range(1, len(parts))}
    above -= set(targets)

    def enter(module: nn.Module, path: str) -> bool:
        return path in above and state_of(module) is None

    _keep(sch, enter)
    return sch


def _keep(sch: Node, enter: Callable[[nn.Module, str], bool]) -> None:
    sch.refuse_inside_other_graph()
    module, graphs = sch.module, sch.tree.graphs
    if state_of(module) is not None:
        raise NotApplicable(
            f"{sch.label} was rewritten already and its graph would be lost",
            fix="trace first, or undo the rewrites",
        )

    def enter_unhooked(child: nn.Module, path: str) -> bool:
        if not enter(child, path):
            return False
        _refuse_hooked(child, path)
        return True

    made = graphs.trace(module, enter_unhooked)
    for path in dict.fromkeys(path for each in made for path in each.inlined):
        _refuse_hooked(module.get_submodule(path), path)  # a graph shared by equal modules was not traced here
    history.reached("after tracing")
    wrong = graphs.check({module: made})
    if module in wrong:
        raise wrong[module]
    sch.commit([SetTrace(sch.tree, module, made)])


def _refuse_hooked(child: nn.Module, path: str) -> None:
    if is_hooked(child):
        raise TraceError(
            f"{path} has a hook, which would be swallowed if its inside became part of this graph",
            fix=f"keep it a call with leaves=({path!r},), or remove the hook",
        )


def _is_leaf(module: nn.Module, path: str, leaves: Sequence[Any]) -> bool:
    for leaf in leaves:
        if isinstance(leaf, type):
            if isinstance(module, leaf):
                return True
        elif isinstance(leaf, str):
            if leaf == path or (is_glob(leaf) and matcher(leaf).fullmatch(path + ".")):
                return True
        elif leaf(path, module):
            return True
    return False


def _refuse_unknown_leaves(sch: Node, leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, str):
            if leaf not in sch:
                raise PathError(f"the leaf {leaf!r} is not a module of {sch.label}", fix="give a path from that module")
        elif not callable(leaf):
            raise NotApplicable(f"{leaf!r} is not a leaf", fix="give a module type, a path, or a predicate")
