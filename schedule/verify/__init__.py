"""Verification of scheduled models against the original: outputs, gradients, training, at several shapes."""

from __future__ import annotations

from schedule.batches import other_shapes
from schedule.verify.equivalence import equivalent
from schedule.verify.equivalence_report import CaseResult, Deviation, EquivalenceReport
from schedule.verify.tolerances import TOLERANCES, Tolerance
from schedule.verify.verification import Verification, verify

__all__ = [
    "TOLERANCES",
    "CaseResult",
    "Deviation",
    "EquivalenceReport",
    "Tolerance",
    "Verification",
    "equivalent",
    "other_shapes",
    "verify",
]
