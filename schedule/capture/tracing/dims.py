"""Mapping from the dimensions of a result to those of its argument, by the operation's name."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

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
