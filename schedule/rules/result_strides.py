"""Whether code after a replacement can tell that its result lies otherwise in memory than that of the construct.

The nodes after the result are run twice, on the strides of the construct and on those of the replacement, until both
are alike. Views, functions and in-place operations need no list: torch says what they make of strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functional_call

from fused.torch_internals.tensor_kinds import storage_of
from schedule.capture import TensorSpec, changed, leaves
from schedule.patterns.match_regions import reads_metadata
from schedule.patterns.side_effects import effects, is_known_layer
from schedule.rules.rule import Modules

_READ_LAYOUT = ("stride", "is_contiguous", "as_strided", "as_strided_", "data_ptr", "storage_offset", "set_")


def _always(tensor: Tensor) -> bool:
    return True


def told_apart(
    output: fx.Node,
    eager: Tensor,
    ours: Tensor,
    relied_on: Callable[[Tensor], bool] = _always,
    modules: Modules | None = None,
) -> str:
    """Return the reason if the strides of a result matter to its readers, else "".

    Args:
        output: a result of a match.
        eager, ours: tensors with the strides that the result has in eager torch, and after the replacement. On the meta
            device nothing is computed, but results of convolutions do not have the strides that they have elsewhere.
        relied_on: whether unknown code and callers may rely on the strides that a value has in eager torch.
        modules: path → module; calls of others are unknown code.
    """
    modules = modules or {}
    worlds: tuple[dict[fx.Node, Any], dict[fx.Node, Any]] = ({output: eager}, {output: ours})
    parted: set[fx.Node] = set()  # views in one world and copies in the other
    for node in _after(output):
        given = [each for each in node.all_input_nodes if each in worlds[0]]
        if not given:
            continue
        if any(each in parted for each in changed(node)):
            return f"{node.name} changes in place what may share memory with the result, depending on its strides"
        alike = all(_alike(worlds[0][each], worlds[1][each]) for each in given)
        if (alike and parted.isdisjoint(given)) or reads_metadata(node):
            continue
        if _is_unknown(node, modules):
            if not alike and any(relied_on(tensor) for each in given for tensor in _tensors(worlds[0][each])):
                return f"{node.name} may read the strides of the result"
            continue
        try:
            results = [_run(node, world, modules) for world in worlds]
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return f"{node.name} fails on the strides of the result"
        shared = [_shares(result, world, given) for result, world in zip(results, worlds, strict=True)]
        if shared[0] != shared[1] or (shared[0] and not parted.isdisjoint(given)):
            parted.add(node)
        if node in parted or not _alike(*results):
            for world, result in zip(worlds, results, strict=True):
                world[node] = result
        for world in worlds:
            for each in given:
                if max(each.users) is node:
                    del world[each]
    return ""


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _is_unknown(node: fx.Node, modules: Modules) -> bool:
    """Check whether a node is code that is not run here, or reads strides itself."""
    if node.op == "call_module":
        return not is_known_layer(modules.get(str(node.target)))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op not in ("call_function", "call_method") or effects(node).opaque or name in _READ_LAYOUT


def _run(node: fx.Node, world: dict[fx.Node, Any], modules: Modules) -> Any:
    device = next(tensor.device for value in world.values() for tensor in _tensors(value))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: _value(each, world, device))
    if node.op == "call_module":
        layer = modules[str(node.target)]
        state = (*layer.named_parameters(), *layer.named_buffers())  # in training a batch norm changes its own
        zeros = {name: torch.zeros_like(tensor, device=device) for name, tensor in state}
        return functional_call(layer, zeros, args, kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a function, not a name


def _value(node: fx.Node, world: dict[fx.Node, Any], device: torch.device) -> Any:
    """Return the value of a node in a world, or zeros of its recorded shape."""
    if node in world:
        return world[node]
    spec = node.meta.get("spec")
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device) if isinstance(spec, TensorSpec) else spec


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def _alike(one: Any, other: Any) -> bool:
    return [each.stride() for each in _tensors(one)] == [each.stride() for each in _tensors(other)]


def _shares(result: Any, world: dict[fx.Node, Any], given: list[fx.Node]) -> bool:
    sources = {storage_of(tensor) for each in given for tensor in _tensors(world[each])}
    return any(storage_of(tensor) in sources for tensor in _tensors(result))
