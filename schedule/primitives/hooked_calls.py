"""Hooks of layers whose calls are replaced: the replacement runs them, or the rewrite is refused.

The call of another module can stand for the call of a layer if it gets the same inputs, and nothing else in the match
reads them. Then a forward pre-hook sees, and may change, the same values, and a full backward hook the same gradients
of them. Both modules have the same tables of hooks: a call that runs the original forward runs the layer with them, a
call of the graph the replacement, and a handle removes a hook from both.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from schedule.capture import runs_hooks_of
from schedule.core.edits import ShareHooks
from schedule.core.matching import Match
from schedule.patterns import GraphMatch
from schedule.util.errors import MatchError


@dataclass(frozen=True)
class HookedCall:
    """Call in a match of a layer with hooks.

    Attributes:
        path: path of the layer.
        args: arguments of the call, with ``kwargs``.
        reads_alone: whether no other node of the match reads them.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads_alone: bool


def hooks_shared(matches: Sequence[Match], new: nn.Module) -> list[ShareHooks]:
    """Return the edit to let ``new`` run the hooks of the one layer in the matches that has some, if there is one."""
    layers = {layer for match in matches for layer in match.sites[0].called.values() if _is_hooked(layer)}
    if len(layers) != 1 or _is_hooked(new) or not layers.isdisjoint(new.modules()):
        return []
    (layer,) = layers
    tables: list[str] = []
    if layer._forward_pre_hooks:
        tables += ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    if layer._backward_hooks and layer._is_full_backward_hook:
        tables += ("_backward_hooks", "_is_full_backward_hook")
    return [ShareHooks(layer, new, tables)]


def hooked_calls(graph_match: GraphMatch, modules: Mapping[str, nn.Module]) -> list[HookedCall]:
    """Return the calls of layers with hooks in a match.

    Raises:
        MatchError: no other module has the hooks.
    """
    found = []
    for node in graph_match.nodes:
        path = str(node.target)
        if node.op != "call_module" or not any(map(_is_hooked, modules[path].modules())):
            continue
        inside = any(map(_is_hooked, list(modules[path].modules())[1:]))
        if inside or not any(_substitutes(other, modules[path]) for other in modules.values()):
            raise _swallowed(path)
        readers = {user for read in node.all_input_nodes for user in read.users if user in graph_match.nodes}
        found.append(HookedCall(path, node.args, node.kwargs, readers == {node}))
    return found


def substitute_of(call: HookedCall, made: Sequence[fx.Node], modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the module in the new nodes that is called in place of a layer, with the layer's arguments.

    Raises:
        MatchError: there is none, or other nodes of the match read the layer's inputs.
    """
    for node in made:
        if node.op != "call_module" or not _substitutes(modules[str(node.target)], modules[call.path]):
            continue
        signature = inspect.signature(modules[str(node.target)].forward)
        try:
            wanted = signature.bind(*call.args, **call.kwargs)
        except TypeError:
            continue
        if call.reads_alone and wanted == signature.bind(*node.args, **node.kwargs):
            node.args, node.kwargs = call.args, dict(call.kwargs)  # hooks see which are given by keyword
            return str(node.target)
    raise _swallowed(call.path)


def _substitutes(other: nn.Module, layer: nn.Module) -> bool:
    return other is not layer and runs_hooks_of(other, layer)


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _swallowed(path: str) -> MatchError:
    return MatchError(
        f"{path} has a hook that the rewrite would swallow", fix="remove the hook first, or match around this module"
    )
