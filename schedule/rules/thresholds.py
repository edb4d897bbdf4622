"""When a rewrite pays: thresholds, and how they were measured.

``python -m benchmarks.rules`` measures them: training steps (forward and backward) of the construct alone, eager
against fused, at growing sizes; the threshold is the size from which fused is never slower, rounded up to a power
of two. Below it the fixed cost of a Python autograd function (some 20 µs) outweighs what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedule.tracing.specs import TensorSpec


@dataclass(frozen=True)
class Threshold:
    """From how many elements on a rewrite pays, by device type; other devices count as ``cuda``."""

    cpu: int
    cuda: int


THRESHOLDS: dict[str, Threshold] = {
    "formula": Threshold(cpu=2**12, cuda=2**12),
    "single": Threshold(cpu=2**15, cuda=2**12),
    "softmax": Threshold(cpu=2**13, cuda=2**12),
}


def small(kind: str, spec: TensorSpec | None) -> str:
    """Why a tensor is too small for a rewrite of this kind; "" if it is not."""
    if spec is None:
        return ""
    row = THRESHOLDS[kind]
    least = row.cpu if spec.device.type == "cpu" else row.cuda
    size = 1
    for length in spec.shape:
        size *= length
    if size >= least:
        return ""
    return (
        f"tiny: {size:,} elements, it pays from {least:,} on {spec.device.type} (record with the sizes you run at, "
        "or cost_guard=False)"
    )
