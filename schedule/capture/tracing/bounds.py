"""Length of ``x[..., :n]`` and ``x[..., -n:]``: it is ``n`` if ``x`` is proved to be at least as long."""

from __future__ import annotations

import operator
from typing import Any, Protocol

from torch import fx, nn

from schedule.capture.tracing.dims import LENGTHENING, dims_of_result, permuted, same_shape, settings_of, size_read
from schedule.capture.tracing.scalars import scalar_of
from schedule.capture.tracing.trace import Trace


class Sizes(Protocol):
    """Reader of sizes for ``tracer``."""

    tracer: Trace

    def size(self, node: fx.Node, dim: int, value: int) -> Any:
        """Return size ``dim`` of ``node``."""


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
