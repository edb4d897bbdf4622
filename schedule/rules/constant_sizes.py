"""Sizes computed by matched code: which of them hold for every call, not only for the recorded one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from schedule.capture import size_read
from schedule.patterns.ops import CannotBind, find_form
from schedule.rules.rule import spec_of


def operation(node: Any) -> str:
    """Return the canonical name of the operation of a node, or "" if it is unknown or no node."""
    form = find_form(node.op, node.target) if isinstance(node, fx.Node) else None
    return "" if form is None else form.definition.name


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operation of the vocabulary by name; none if they do not fit it."""
    form = find_form(node.op, node.target)
    try:
        return {} if form is None else form.bind(node.args, node.kwargs)[0]
    except CannotBind:
        return {}


def is_half(size: Any, is_source: Callable[[fx.Node], bool]) -> bool:
    """Check whether ``size`` is computed as half of the last dimension of a tensor that ``is_source`` accepts."""
    if operation(size) != "floor_divide" or size.args[1] != 2:
        return False
    tensor, dim = size_read(size.args[0]) or (None, 0)
    spec = spec_of(tensor)
    return tensor is not None and spec is not None and dim in (-1, spec.ndim - 1) and is_source(tensor)


_WEIGHTS = {"linear": "weight", "matmul": "other", "bmm": "other", "addmm": "mat2"}
_SAME_SIZES = ("cast", "to", "transpose", "t", "contiguous", "detach")


def is_width_fixed(x: Any) -> bool:
    """Check whether a parameter fixes the size of the last dimension of ``x``, the result of a projection."""
    spec = spec_of(x)
    while operation(x) == "add":  # a bias, which may be wider than what it is added to
        x = x.args[0]
    own = spec_of(x)
    if spec is None or own is None or spec.shape[-1:] != own.shape[-1:] or own.shape[-1:] in ((), (1,)):
        return False
    return _is_parameter(arguments(x).get(_WEIGHTS.get(operation(x), "")))


def _is_parameter(value: Any) -> bool:
    """Check whether ``value`` is a parameter, or one of its items, cast or transposed."""
    while isinstance(value, fx.Node) and value.op != "get_attr":
        item = operation(value) == "getitem" and _is_number(value.args[1])
        if operation(value) not in _SAME_SIZES and not item:
            return False
        value = value.args[0]
    return isinstance(value, fx.Node)


def _is_number(index: Any) -> bool:
    return isinstance(index.meta.get("spec") if isinstance(index, fx.Node) else index, int)


_WITH_SIZES = {"expand": "size", "broadcast_to": "size", "view": "size", "reshape": "shape"}


def is_last_one(x: Any) -> bool:
    """Check whether the last dimension of ``x`` has one element at any size of the inputs."""
    given = arguments(x) if isinstance(x, fx.Node) else {}
    name, spec = operation(x), spec_of(x)
    if name in ("cast", "to", "type_as", "contiguous"):
        return is_last_one(given.get("input"))
    if name == "unsqueeze" and spec is not None:
        return given["dim"] in (-1, spec.ndim - 1)
    if name in ("amax", "amin", "sum", "mean", "logsumexp") and spec is not None:
        return given["keepdim"] is True and given["dim"] in (-1, spec.ndim - 1)
    sizes = given.get(_WITH_SIZES.get(name, ""))
    if not isinstance(sizes, (tuple, list)) or not sizes:
        return False
    return sizes[-1] == 1 or (sizes[-1] == -1 and name == "expand" and is_last_one(given["input"]))


def reads_any(value: Any, nodes: set[fx.Node]) -> bool:
    """Check whether a bound size is computed from any of ``nodes``."""
    stack, seen = [value] if isinstance(value, fx.Node) else [], set()
    while stack:
        node = stack.pop()
        if node in nodes:
            return True
        if node not in seen and spec_of(node) is None:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False
