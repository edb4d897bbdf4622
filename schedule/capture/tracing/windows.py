"""Lengths of the results of convolutions and poolings, as arithmetic on the lengths of their inputs.

The formulas are those in torch's documentation of ``nn.Conv2d`` and ``nn.AvgPool2d``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import conv, pooling

from schedule.capture.recording.specs import TensorSpec
from schedule.capture.tracing.own_forward import has_own_forward
from schedule.capture.tracing.scalars import scalar_of
from schedule.capture.tracing.trace import Sizes

_SPATIAL = 2
"""The first dimension that a window moves along, after those of samples and channels."""


def windowed_size(sizes: Sizes, node: fx.Node, dim: int, value: int) -> Any:
    """Return size ``dim`` of the result of a convolution or pooling, ``value`` in the recorded run, or None."""
    rank, source = len(node.meta["spec"].shape), node.args[0]
    weight: Any = None
    given = _arguments_of(node, rank)
    if node.op == "call_module":
        child = sizes.tracer.module.get_submodule(str(node.target))
        given = {name: sizes.setting(node, child, name) for name in _settings_of(child, rank)}
        weight = sizes.tracer.node_of(child.weight) if given and hasattr(child, "weight") else None
    spec = source.meta.get("spec") if isinstance(source, fx.Node) else None
    if not given or not isinstance(source, fx.Node) or not isinstance(spec, TensorSpec) or spec.ndim != rank:
        return None
    weight = given.get("weight", weight)
    of_weight: tuple[int, ...] = () if weight is None else weight.meta["spec"].shape
    if dim == 1 and of_weight:
        return sizes.size(weight, 0, of_weight[0])
    length = sizes.assumed(source, dim, spec.shape[dim])
    if dim < _SPATIAL or length is None:
        return length
    kernel = sizes.size(weight, dim, of_weight[dim]) if of_weight else given["kernel_size"]
    traced = _windowed_length(length, given, kernel, dim)
    return traced if (scalar.value if (scalar := scalar_of(traced)) else traced) == value else None


def _windowed_length(length: Any, given: dict[str, Any], kernel: Any, dim: int) -> Any:
    """Return the length of the result along ``dim``, or None if it has no such form.

    Args:
        length: length of the input along ``dim``.
        given: settings of the convolution or pooling, by their names in ``torch.nn.functional``.
        kernel: number of elements of the window along ``dim``, or for each dimension.
        dim: at least 2, behind samples and channels.
    """
    settings = (kernel, given["stride"] or kernel, given["padding"], given.get("dilation", 1))
    numbers = [_along(setting, dim - _SPATIAL) for setting in settings]
    if None in numbers:
        return None
    kernel, stride, padding, dilation = numbers
    span = length + 2 * padding - dilation * (kernel - 1) - 1
    if not given.get("ceil_mode"):
        return span // stride + 1
    # the last window has to begin inside the input or the padding before it
    return torch.sym_min(-(-span // stride), (length + padding - 1) // stride) + 1


def _along(setting: Any, dim: int) -> Any:
    if setting == "valid":
        return 0
    if isinstance(setting, (tuple, list)) and setting:
        setting = setting[dim] if len(setting) > 1 else setting[0]
    return setting if isinstance(setting, (int, torch.SymInt)) else None


def _arguments_of(node: fx.Node, rank: int) -> dict[str, Any] | None:
    """Return the arguments by name if ``node`` calls a convolution or pooling function of ``rank`` dimensions."""
    name = getattr(node.target, "__name__", "").lstrip("_")
    signature = _SIGNATURES.get(name.replace(f"{rank - _SPATIAL}d", "")) if node.op == "call_function" else None
    if signature is None:
        return None
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError:  # another function of this name
        return None
    bound.apply_defaults()
    return bound.arguments


def _settings_of(module: nn.Module, rank: int) -> tuple[str, ...]:
    """Return the names of the size settings of a convolution or pooling, or none for another module."""
    cls = type(module)
    shipped = cls.__module__ in (conv.__name__, pooling.__name__) and has_own_forward(cls)
    return _SETTINGS.get(cls.__name__.replace(f"{rank - _SPATIAL}d", ""), ()) if shipped else ()


def _signature(*names: str, **defaults: Any) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    optional = (inspect.Parameter(name, kind, default=default) for name, default in defaults.items())
    return inspect.Signature([*(inspect.Parameter(name, kind) for name in names), *optional])


_SIGNATURES = {
    "conv": _signature("input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1),
    "max_pool": _signature(
        "input", "kernel_size", stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
    ),
    "avg_pool": _signature(
        "input",
        "kernel_size",
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    ),
}
_SETTINGS = {
    "Conv": ("stride", "padding", "dilation"),
    "MaxPool": ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "AvgPool": ("kernel_size", "stride", "padding", "ceil_mode"),
}
