"""Whether two computations that differ in float32 differ by rounding alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import schedule
from schedule.errors import VerificationError
from schedule.examples.inputs import Inputs
from schedule.tracing.structure import map_structure
from schedule.verify.tolerances import Tolerance

_ROUNDED = Tolerance(1e-6, 1e-6, 1e-2, 1e-9, 5e-3, 1e-3, 1e-3)
"""Rounding is 10⁻⁹ times as large in float64 as in float32; a mistake is as large."""


def agrees_in_float64(model: nn.Module, batches: Sequence[Inputs], steps: int, rules: Any = "all") -> bool:
    """Whether ``model``, turned to float64, computes the same when ``rules`` have rewritten it.

    Args:
        model: without a schedule; stays in float64.
        batches: what it is called with; the first is what it is scheduled for.
        steps: optimizer steps to compare.
        rules: as for ``optimize``.
    """
    wide = [map_structure(batch, _widened) for batch in batches]
    sch = schedule.create_schedule(model.double(), wide[0])
    if not schedule.optimize(sch, rules=rules, cost_guard=False).applied:
        return False
    try:
        return all(schedule.verify(sch, batch, steps=steps, tolerance=_ROUNDED).report.equal for batch in wide)
    except VerificationError:
        return False


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
