"""Cost of computing a value again in the backward pass, as a share of the layers that read it.

On one core of an x86-64 server a fused norm or activation takes 1 to 2.5 ns for an element, as long as a product takes
for 40 to 100 multiplications, and having it computed again 0.1 to 0.3 ms for any size. In a small UNet, where all such
values together are 33 MiB of 186, a training step took 1.03 to 1.06 of eager's when all of them were computed again.
Other devices were not measured: there every value that can be computed again is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from schedule.capture import TensorSpec
from schedule.patterns.normalized_nodes import NormalGraph, OpNode

ELEMENT = 90
"""Multiplications of a product in the time that a fused op takes for an element."""

CALL = 2**22
"""Multiplications of a product in the time that it takes to have a value computed again, of any size."""

HIGHEST_SHARE = 0.05
"""Highest profitable time, relative to the three products of each layer, of the forward and of the backward pass."""

_LAYERS = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), ("input", "weight", 0)),
    "matmul": ("input", "other", 1),
    "addmm": ("mat1", "mat2", 1),
}
"""Layers that can have their input computed again: the arguments for it and the weight, and the weight's dimension of
the features that they compute."""


def costly_again(value: OpNode | None, normal: NormalGraph) -> str:
    """Return the reason if a value should be saved for the layers that read it, not computed again, else "".

    All layers in the graph that read it, or views of it, count together, as it is computed once for all of them.

    Args:
        value: the operation that computes it, or a view of it; None for a parameter.
        normal: the graph.
    """
    source = None if value is None else value.source
    if source is None or not isinstance(source.spec, TensorSpec) or source.spec.device.type != "cpu":
        return ""
    products = 3 * sum(_multiplications(layer, read) for layer, read in _readers(source, normal))
    size = math.prod(source.spec.shape)
    if not products or CALL + ELEMENT * size <= HIGHEST_SHARE * products:
        return ""
    return (
        f"computing {size:,} elements again takes about {(CALL + ELEMENT * size) / products:.0%} as long as the layers "
        f"that read them, profitable up to {HIGHEST_SHARE:.0%} (give example inputs of the size you run at, or "
        "cost_guard=False)"
    )


def _readers(value: OpNode, normal: NormalGraph) -> Iterator[tuple[OpNode, OpNode]]:
    """Yield the operations that read a value or a view of it, each with what it reads."""
    for user in normal.users_of(value):
        if user.source is value.source:
            yield from _readers(user, normal)
        else:
            yield user, value


def _multiplications(operation: OpNode, value: OpNode) -> int:
    """Return the multiplications of a layer that reads a value, or 0 if the operation is none."""
    input, weight, dim = _LAYERS.get(operation.op, ("", "", 0))
    factors = operation.args.get(weight)
    result, spec = operation.spec, factors.spec if isinstance(factors, OpNode) else None
    if operation.args.get(input) is not value or not isinstance(result, TensorSpec) or not isinstance(spec, TensorSpec):
        return 0
    if spec.ndim < 2 or (dim == 1 and spec.ndim > 2):
        return 0  # a product with a vector, or of two batches of matrices
    return math.prod(result.shape) * math.prod(spec.shape) // max(spec.shape[dim], 1)
