"""Rules for the sizes of results, by the operation: dimensions that stay, slices, convolutions, poolings.

The formulas are those in torch's documentation of ``nn.Conv2d`` and ``nn.AvgPool2d``.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import conv, pooling

from schedule.capture.graph.scalars import scalar_of
from schedule.capture.graph.trace_interface import Sizes
from schedule.capture.guards.own_forward import has_own_forward
from schedule.capture.recording.structure import TensorSpec

# -- Mapping from the dimensions of a result to those of its argument ---------------------------------------


SAME_SHAPE_METHODS = {
    "to", "type", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach", "softmax", "relu",
    "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "abs", "masked_fill", "masked_fill_", "bool", "long", "int",
    "type_as", "log_softmax", "square", "gelu", "silu", "clamp", "cos", "sin", "cumsum", "requires_grad_",
}  # fmt: skip
SAME_SHAPE_FUNCTIONS = {
    "softmax", "dropout", "gelu", "relu", "silu", "tanh", "sigmoid", "layer_norm", "rms_norm", "log_softmax",
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "neg", "invert", "rsqrt",
    "sqrt", "exp", "cumsum", "logical_not", "clamp", "mish", "hardswish", "leaky_relu", "elu", "softplus",
    "batch_norm", "group_norm", "instance_norm", "dropout1d", "dropout2d", "dropout3d", "hardtanh", "relu6",
    "hardsigmoid",
}  # fmt: skip
SCALAR_OPERATORS = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.gt, operator.lt,
    operator.ge, operator.le, operator.eq, operator.ne,
}  # fmt: skip
LENGTHENING = ("update", "update_conv_state", "update_recurrent_state")
ADDED = -1


def same_shape(node: fx.Node) -> bool:
    """Check by name whether the node returns a tensor of the same shape as its first argument."""
    if node.target in SCALAR_OPERATORS:
        other = node.args[1]
        return not (isinstance(other, fx.Node) and hasattr(other.meta.get("spec"), "shape"))
    if node.op == "call_method":
        return node.target in SAME_SHAPE_METHODS
    return node.op == "call_function" and getattr(node.target, "__name__", "") in SAME_SHAPE_FUNCTIONS


def settings_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a call besides the first, by position or by name."""
    return (*node.args[1:], *node.kwargs.values())


def permuted(name: str, arguments: tuple[Any, ...], dim: int, rank: int) -> int:
    """Return the dim of the source for ``dim`` of the result of a transpose or permute."""
    if name == "permute":
        order = arguments[0] if isinstance(arguments[0], (tuple, list)) else arguments
        return order[dim] % rank
    first, second = (d % rank for d in arguments[:2])
    return {first: second, second: first}.get(dim, dim)


def size_read(node: Any) -> tuple[fx.Node, int] | None:
    """Return ``(x, i)`` if ``node`` is ``x.shape[i]``, else None."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return None
    shape = node.args[0]
    if isinstance(shape, fx.Node) and shape.target is getattr and shape.args[1] == "shape":
        return shape.args[0], node.args[1]  # type: ignore[return-value]
    return None


def dims_of_result(index: Any, rank: int) -> list[int | None] | None:
    """Return the dim of ``x`` for each dim of ``x[index]``.

    It is :data:`ADDED` for a new dim and None for a sliced one. Returns None if the index is a tensor or a graph value.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (item is None or item is Ellipsis or isinstance(item, (int, slice))) for item in items):
        return None  # a tensor, or a number of the graph
    used = sum(isinstance(item, (int, slice)) for item in items)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = [slice(None)] * (rank - used)
    dims: list[int | None] = []
    dim = 0
    for item in items:
        if item is None:
            dims.append(ADDED)
            continue
        if isinstance(item, slice):
            dims.append(dim if item == slice(None) else None)
        dim += 1
    return dims


# -- Length of ``x[...,  ------------------------------------------------------------------------------------


def sliced_length(sizes: Sizes, source: fx.Node, dim: int, part: slice) -> Any:
    """Return the node of the length of ``part`` of ``source`` along ``dim``, or None if unknown."""
    if part.step is not None:
        return None
    length: Any = None
    if part.start is None and isinstance(part.stop, fx.Node):
        length = part.stop
    elif part.stop is None and isinstance(part.start, fx.Node) and part.start.target is operator.neg:
        length = part.start.args[0]
    return length if isinstance(length, fx.Node) and _at_least(sizes, source, dim, length) else None


def _at_least(sizes: Sizes, node: Any, dim: int, length: fx.Node) -> bool:
    """Check whether size ``dim`` of ``node`` is at least ``length`` for all inputs."""
    spec = node.meta.get("spec")
    rank = len(spec.shape)
    known = scalar_of(sizes.size(node, dim, spec.shape[dim]))
    if known is not None and known.node is length:
        return True
    read = None if known is None else size_read(known.node)
    if read is not None and read != (node, dim):
        return _at_least(sizes, *read, length)
    source = _source(node)
    if source is None:
        return False
    if node.meta.get("opaque"):
        return node.target in LENGTHENING and _at_least(sizes, node.args[1], dim, length)
    if node.target is operator.getitem and hasattr(source.meta.get("spec"), "ndim"):
        dims = dims_of_result(node.args[1], source.meta["spec"].ndim)
        at = None if dims is None else dims[dim]
        return at is not None and at >= 0 and _at_least(sizes, source, at, length)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in ("transpose", "permute"):
        return _at_least(sizes, source, permuted(name, settings_of(node), dim, rank), length)
    padded = dim == 2 and _is_padded_convolution(sizes, node, name)
    return (padded or same_shape(node)) and _at_least(sizes, source, dim, length)


def _source(node: fx.Node) -> Any:
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and node.op != "get_attr" else None


def _is_padded_convolution(sizes: Sizes, node: fx.Node, name: str) -> bool:
    """Check whether the node is a 1-d convolution of fixed settings with an output at least as long as its input."""
    if node.op == "call_module":
        child: Any = sizes.tracer.module.get_submodule(str(node.target))
        if not isinstance(child, nn.Conv1d) or type(child).forward is not nn.Conv1d.forward:
            return False
        padded = child.padding[0]
        known = child.stride == (1,) and isinstance(padded, int)
        return known and 2 * int(padded) >= child.dilation[0] * (child.kernel_size[0] - 1)
    if name != "conv1d":
        return False
    given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation"), node.args, strict=False))
    given |= node.kwargs
    weight, padding = given.get("weight"), given.get("padding", 0)
    if given.get("stride", 1) != 1 or given.get("dilation", 1) != 1 or not all(map(_of_parameters, (weight, padding))):
        return False
    number = padding.meta.get("spec") if isinstance(padding, fx.Node) else padding
    return isinstance(number, int) and isinstance(weight, fx.Node) and 2 * number >= weight.meta["spec"].shape[-1] - 1


def _of_parameters(value: Any) -> bool:
    """Check whether ``value`` is the same in every call: a constant, or computed from parameters only."""
    if not isinstance(value, fx.Node):
        return True
    return value.op == "get_attr" or (bool(value.all_input_nodes) and all(map(_of_parameters, value.all_input_nodes)))


# -- Lengths of the results of convolutions and poolings ----------------------------------------------------


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
