"""What a call in a trace does besides its result, and whether the result is constant or requires grad.

A graph is analyzed by the names and schemas of its functions (:mod:`schedule.capture.effects.effects`). A function that
does more than these say is refused, or noted on its node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.schemas import is_custom
from fused.torch_internals.tensor_kinds import storage_of
from schedule.capture.effects.effects import changed, has_effect, uses_random
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.recording.data_dependence import decided
from schedule.capture.recording.structure import TensorSpec, leaves
from schedule.capture.recording.user_lines import user_line
from schedule.util.errors import TraceError

# -- Whether a value requires grad --------------------------------------------------------------------------


_CUT = {"detach", "detach_", "argmax", "argmin", "argsort"}


def requires_grad(node: Any, known: Mapping[fx.Node, bool], grad_enabled: bool) -> bool:
    """Return the expected ``.requires_grad`` of a value. A graph depending on it checks it at each call.

    Args:
        node: the node of the value.
        known: the answer for inputs, parameters and buffers.
        grad_enabled: whether gradients are recorded.
    """
    pending, seen = [node], set[fx.Node]()
    while pending:
        each = pending.pop()
        if each in known:
            if known[each] and (grad_enabled or each is node):
                return True
        elif isinstance(each, fx.Node) and each not in seen and _is_differentiable(each):
            seen.add(each)
            pending += each.all_input_nodes
    return False


def _is_differentiable(node: fx.Node) -> bool:
    spec, name = node.meta.get("spec"), getattr(node.target, "__name__", node.target)
    floating = not isinstance(spec, TensorSpec) or spec.dtype.is_floating_point or spec.dtype.is_complex
    return floating and name not in _CUT and spec is not None and not isinstance(spec, (bool, int, float, torch.Size))


# -- Values that a graph computes from constants alone ------------------------------------------------------


_MOST_NODES = 64
_MOST_NUMBERS = 1024


def known_truth(node: fx.Node) -> bool | None:
    """Return the truth of a value if it is the same at each call, else None."""
    known = decided(node)
    if known is not None:
        return known
    order, values = _ancestors(node), dict[fx.Node, Any]()
    if order is None:
        return None
    with DisableTorchFunction():
        for each in order:
            args, kwargs = fx.node.map_arg((each.args, each.kwargs), values.__getitem__)
            if each.op == "call_method":
                values[each] = getattr(args[0], str(each.target))(*args[1:], **kwargs)
            else:
                values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    return bool(values[node])


def _ancestors(node: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that ``node`` is computed from, and itself last; None if not all are small and pure."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.op not in ("call_function", "call_method") or uses_random(each) or has_effect(each):
            return None
        if "empty" in str(each.target):  # whatever the memory held
            return None
        spec = each.meta.get("spec")
        if isinstance(spec, TensorSpec) and math.prod(map(int, spec.shape)) > _MOST_NUMBERS:
            return None
        found[each] = None
        if len(found) > _MOST_NODES:
            return None
        waiting += each.all_input_nodes
    return [each for each in node.graph.nodes if each in found]


# -- Side effects of traced torch calls, as observed --------------------------------------------------------


def written_tensors(tracer: Trace, node: fx.Node, arguments: Any) -> list[torch.Tensor]:
    """Return the tensors of ``arguments`` that the call of ``node``, evaluated just before, has changed in place.

    Marks a node that draws random numbers, and that of a custom operator, which may; and a node that may raise because
    of data.

    Raises:
        TraceError: it has changed another one than :func:`~schedule.capture.effects.effects.changed` finds.
    """
    mode, known = tracer.recording.fake_mode, set(changed(node))
    if mode.draws or is_custom(node.target):
        node.meta["draws"] = True
    if mode.raises or _is_indexed_by_tensor(node):
        node.meta["raises"] = True
    if not known and not mode.written:
        return []
    given = [leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
    written = [tensor for tensor in given if tracer.node_of(tensor) in known]
    with DisableTorchFunction():
        hidden = mode.written - {storage_of(tracer.value_of(tensor)) for tensor in written}
        unexpected = [tensor for tensor in given if storage_of(tracer.value_of(tensor)) in hidden]
    if unexpected:
        raise TraceError(
            f"the function {getattr(node.target, '__name__', node.target)} changes what it is given in place (a tensor "
            f"of shape {tuple(unexpected[0].shape)}), which neither its name nor its signature says",
            where=user_line(),
            fix="keep the module that calls it a leaf (`leaves=(…,)`), or use an operator that declares what it writes",
        )
    return written


def _is_indexed_by_tensor(node: fx.Node) -> bool:
    specs = [each.meta.get("spec") for each in node.all_input_nodes[1:]]
    return node.target is operator.getitem and any(isinstance(spec, TensorSpec) for spec in specs)
