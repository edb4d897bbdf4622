"""Cost of computing a value again in the backward pass, as a share of the layers that read it.

On one core of an x86-64 server a fused norm or activation takes 1 to 2.5 ns for an element, as long as a product takes
for 40 to 100 multiplications, and having it computed again 0.1 to 0.3 ms for any size. In a small UNet, where all such
values together are 33 MiB of 186, a training step took 1.03 to 1.06 of eager's when all of them were computed again.
Other devices were not measured: there every value that can be computed again is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from schedule.capture.recording.specs import TensorSpec
from schedule.patterns.values import NormalGraph, OpNode

ELEMENT = 90
"""Multiplications of a product in the time that a fused op takes for an element."""

CALL = 2**22
"""Multiplications of a product in the time that it takes to have a value computed again, of any size."""

HIGHEST_SHARE = 0.05
"""Highest profitable time, relative to the three products of each layer, of the forward and of the backward pass."""

_LAYERS = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), ("input", "weight")),
    "matmul": ("input", "other"),
    "addmm": ("mat1", "mat2"),
}
"""Layers that save their input: the arguments for the input and for the weight."""


def costly_again(value: Any, normal: NormalGraph) -> str:
    """Return the reason if a value should be saved for the layers that read it, not computed again, else "".

    All layers in the graph that read it, or views of it, count together, as it is computed once for all of them.

    Args:
        value: the operation that computes it, or of a view of it.
        normal: the graph.
    """
    value = source_of(value)
    if not isinstance(value, OpNode) or not isinstance(value.spec, TensorSpec) or value.spec.device.type != "cpu":
        return ""
    products = 3 * sum(_multiplications(layer, read) for layer, read in _readers(value, normal))
    size = math.prod(value.spec.shape)
    if not products or CALL + ELEMENT * size <= HIGHEST_SHARE * products:
        return ""
    return (
        f"computing {size:,} elements again takes about {(CALL + ELEMENT * size) / products:.0%} as long as the layers "
        f"that read them, profitable up to {HIGHEST_SHARE:.0%} (give example inputs of the size you run at, or "
        "cost_guard=False)"
    )


def source_of(value: Any) -> Any:
    """Return what a value is a view of, or the value."""
    while isinstance(value, OpNode) and value.is_view:
        value = next(iter(value.args.values()))
    return value


def _readers(value: OpNode, normal: NormalGraph) -> Iterator[tuple[OpNode, OpNode]]:
    """Yield the operations that read a value or a view of it, each with what it reads."""
    for user in normal.users_of(value):
        if user.is_view and source_of(user) is source_of(value):
            yield from _readers(user, normal)
        else:
            yield user, value


def _multiplications(layer: OpNode, value: OpNode) -> int:
    """Return the multiplications of a layer that reads a value, or 0 if it is none."""
    input, weight = (layer.args.get(name) for name in _LAYERS.get(layer.op, ("", "")))
    result, factors = layer.spec, weight.spec if isinstance(weight, OpNode) else None
    if input is not value or not isinstance(result, TensorSpec) or not isinstance(factors, TensorSpec):
        return 0
    features = result.shape[-1] if factors.ndim == 2 else factors.shape[0]
    return math.prod(result.shape) * math.prod(factors.shape) // max(features, 1)
