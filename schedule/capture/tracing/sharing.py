"""One graph for many like modules, so the layers of a model are traced only once.

Two modules share a graph if their classes, parameter shapes and attributes agree, recursively, and they were called
with like arguments. Plain attributes (a layer's index) need not agree unless the forward reads them.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from schedule.capture.recording.recording import Call, Opaque
from schedule.capture.recording.specs import TensorSpec
from schedule.capture.recording.structure import leaves
from schedule.capture.tracing.opaque import Constant
from schedule.capture.tracing.reading.plain import is_atom

_HOOKS = {name for name in vars(nn.Module()) if name.startswith(("_", "training", "call_super_init"))}
_HOOKS.add("_schedule_state")  # a child stays a call, whatever it runs


def structural_key(module: nn.Module, call: Call, *context: Hashable) -> Hashable:
    """Return a key shared by modules with equivalent forwards on ``call``, ignoring plain attributes."""
    return (tuple(_described(module)), _call_key(call), context)


def _described(module: nn.Module) -> Iterator[Hashable]:
    for name, child in module.named_modules():
        tables = (child._parameters, child._buffers)
        tensors = tuple((key, _tensor_key(tensor)) for table in tables for key, tensor in table.items())
        others = tuple((key, _value_key(value)) for key, value in vars(child).items() if key not in _HOOKS)
        yield (name, type(child), tensors, others)


def _tensor_key(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.shape, tensor.layout, strides, tensor.dtype, tensor.device


def _value_key(value: Any) -> Hashable:
    if is_atom(value):
        return "plain"
    if isinstance(value, types.MethodType):
        return id(value.__func__)
    if isinstance(value, torch.Tensor):
        return _tensor_key(value)
    if isinstance(value, (list, tuple, dict, set)):
        return repr(value)
    return id(value)


def _call_key(call: Call) -> Hashable:
    return tuple((path, _leaf_key(leaf)) for path, leaf in leaves((call.args, call.kwargs, call.output)))


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, TensorSpec):
        return leaf
    if isinstance(leaf, Opaque):
        return str(type(leaf.snapshot))
    return leaf if isinstance(leaf, Hashable) else id(leaf)


def comparable(value: Any) -> list[Any]:
    """Describe arguments for comparison: shapes and dtypes of tensors, plain values, classes of others."""

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, TensorSpec)):
            return (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Opaque):
            return type(leaf.snapshot)
        return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)

    return [(path, kind(leaf)) for path, leaf in leaves(value)]


def has_constants(specialization: Any) -> bool:
    """Check whether the graph contains an object of possibly one module only."""
    return any(isinstance(node.target, Constant) for node in specialization.graph.nodes)
