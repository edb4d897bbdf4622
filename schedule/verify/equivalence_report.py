"""Results of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from schedule.util.wording import counted


@dataclass(frozen=True)
class Deviation:
    """Deviation of one tensor from its reference.

    Attributes:
        kind: ``output``, ``gradient``, ``update``, ``buffer``, ``random state``, …
        name: parameter name or path in the output.
        max_abs: largest absolute difference.
        max_rel: the difference relative to its scale (element plus RMS; RMS for updates), comparable to
            ``tolerance``.
        tolerance: the largest allowed ``max_rel``.
        excess: 1 at the limit of the allowed, floor included; infinite when there is nothing to measure.
        note: description of a difference without a size, such as a missing gradient.
    """

    kind: str
    name: str
    max_abs: float = 0.0
    max_rel: float = 0.0
    tolerance: float = 0.0
    excess: float = 0.0
    note: str = ""

    @property
    def acceptable(self) -> bool:
        """Whether it is within tolerance."""
        return self.excess <= 1.0

    def __str__(self) -> str:
        where = f"{self.kind} {self.name}".strip()
        if self.note:
            return f"{where}: {self.note}"
        return f"{where}: max abs {self.max_abs:.3g}, relative {self.max_rel:.3g}, allowed {self.tolerance:.3g}"


@dataclass(frozen=True)
class CaseResult:
    """The comparison of one mode, one set of weights and one batch.

    Attributes:
        mode: ``train`` or ``eval``.
        weights: ``own`` or ``perturbed``.
        shapes: the shapes of the batch.
        deviations: the worst of each kind, worst first.
        compared: how many tensors were compared.
    """

    mode: str
    weights: str
    shapes: str
    deviations: tuple[Deviation, ...]
    compared: int

    @property
    def worst(self) -> Deviation | None:
        """The first and worst deviation, or None."""
        return self.deviations[0] if self.deviations else None

    @property
    def equal(self) -> bool:
        """Whether everything was within tolerance."""
        return all(deviation.acceptable for deviation in self.deviations)

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "DIFFERENT"
        where = f"{self.mode} mode, {self.weights} weights, {self.shapes}"
        return f"{verdict} in {where}: {self.worst or 'no tensors'}"


@dataclass
class EquivalenceReport:
    """Result for two models, true exactly if they are equal.

    Attributes:
        cases: what was compared, in order. Comparing stops at the first difference.
        skipped: cases in which the reference itself fails, counts of tensors left out, and cases compared without
            dropout, with the reasons.
    """

    cases: list[CaseResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every case was equal."""
        return all(case.equal for case in self.cases)

    @property
    def failed(self) -> CaseResult | None:
        """The failing case, or None."""
        return next((case for case in self.cases if not case.equal), None)

    @property
    def worst(self) -> Deviation | None:
        """The deviation with the largest excess, or None."""
        found = [case.worst for case in self.cases if case.worst is not None]
        return max(found, key=lambda deviation: deviation.excess, default=None)

    @property
    def max_deviation(self) -> float:
        """Largest relative deviation of outputs and gradients, comparable to a tolerance.

        Updates have a separate, coarser scale. Deviations below the floor count as rounding here too: the relative
        deviation of a mathematically zero gradient means nothing.
        """
        kinds = ("output", "gradient", "input gradient")
        found = (min(d.excess * d.tolerance, d.max_rel) for c in self.cases for d in c.deviations if d.kind in kinds)
        return max(found, default=0.0)

    def __bool__(self) -> bool:
        return self.equal

    @property
    def compared(self) -> str:
        """What was compared, such as ``12 cases at 3 shapes``."""
        shapes = len({case.shapes for case in self.cases})
        only = "" if any(case.mode == "train" for case in self.cases) else " in eval mode only"
        return f"{counted(len(self.cases), 'case')} at {counted(shapes, 'shape')}{only}"

    @property
    def sentence(self) -> str:
        """What was compared, and the result, as one sentence."""
        if not self.cases:
            return "Nothing was compared: no primitive was applied."
        if self.failed is not None:
            return f"The results differ: {self.failed}"
        return f"The results are equal in {self.compared}; largest relative deviation {self.max_deviation:.2g}."

    def __str__(self) -> str:
        cases = [f"  {case}" for case in self.cases]
        return "\n".join([self.sentence, *cases, *(f"  skipped {reason}" for reason in self.skipped)])


def missing(kind: str, name: str, note: str) -> Deviation:
    """Return a deviation for a difference without a size, described by ``note``."""
    return Deviation(kind, name, math.inf, math.inf, 0.0, math.inf, note)
