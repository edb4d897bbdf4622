"""Whether a value requires grad, derived from its graph because data-free tensors do not record it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from schedule.capture.recording.specs import TensorSpec

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
