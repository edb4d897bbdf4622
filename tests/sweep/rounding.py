"""Whether two computations that differ in float32 differ by rounding alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import schedule
from schedule.batches import Inputs
from schedule.capture.recording.structure import map_structure
from schedule.util.errors import NotApplicable, ScheduleError
from schedule.verify.tolerances import TOLERANCES, Tolerance
from tests.sweep import REFUSALS

_FLOAT32 = TOLERANCES[torch.float32]
_NEAR = replace(_FLOAT32, forward=50 * _FLOAT32.forward, gradient=50 * _FLOAT32.gradient, floor=50 * _FLOAT32.floor)
_WIDE = Tolerance(1e-6, 1e-6, 1e-2, 1e-9, 5e-3, 1e-3, 1e-3)
"""Rounding is 10⁻⁹ times as large in float64 as in float32; a mistake is as large."""

SEEDS = (1, 2, 3)


def is_rounding(build: Callable[[int], nn.Module], batches: Sequence[Inputs], steps: int, rules: Any = "all") -> bool:
    """Whether what ``rules`` make of a model differs from it, with the weights of seed 0, by rounding alone.

    In float64 the same rewrites agree then. Where that runs other code, in which nothing is rewritten: the difference
    is small, and there is none with other weights.

    Args:
        build: makes the model, with weights for a seed.
        batches: what it is called with; the first is what it is scheduled for.
        steps: optimizer steps to compare.
        rules: as for ``optimize``.
    """
    wide = [map_structure(batch, widened) for batch in batches]
    agrees = _agrees(build(0).double(), wide, steps, rules, _WIDE)
    if agrees is None:
        agrees = _agrees(build(0), batches, steps, rules, _NEAR)
        agrees = agrees and all(_agrees(build(seed), batches, steps, rules, _FLOAT32) for seed in SEEDS)
    return bool(agrees)


def _agrees(model: nn.Module, batches: Sequence[Inputs], steps: int, rules: Any, tolerance: Tolerance) -> bool | None:
    """Whether the model computes the same when it is rewritten; None if nothing is, or it refuses these inputs."""
    sch = schedule.create_schedule(model, batches[0])
    try:
        if not schedule.optimize(sch, rules=rules, cost_guard=False).applied:
            return None
    except NotApplicable:
        return None
    try:
        return all(schedule.verify(sch, batch, steps=steps, tolerance=tolerance).report.equal for batch in batches)
    except (ScheduleError, *REFUSALS):
        return False


def widened(leaf: Any) -> Any:
    """Return a floating-point tensor in float64, anything else as it is."""
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
