"""Values that a graph computes from constants alone, such as the checks of ``torch.distributions.Normal(0, 1)``."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.recording.data import decided
from schedule.capture.recording.specs import TensorSpec
from schedule.capture.tracing.effects import has_effect, uses_random

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
