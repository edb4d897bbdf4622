"""Choice of the next point: Gaussian processes of time and memory over the knobs, and expected improvement.

Most of the effect of a knob on time and memory is a factor independent of the other knobs; the rest depends on all of
them. The kernel is a sum of both parts, over logarithms. The next point is the one with the largest expected
improvement times the probability that it is within the bound and does not fail (Gardner et al. 2014, Bayesian
optimization with inequality constraints). Both are also learned from trials over the bound: fast points mostly need
much memory, and under a tight bound there is little other data to learn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schedule.tuning.space import Choice, Knob, Knobs, Space
from schedule.tuning.trial import Trial

Array = NDArray[np.float64]

_ALONE = 0.6
"""Fraction of the variance from the separate effects of the knobs."""
_FALL = 1.0
"""Decrease of the logarithm of the similarity from one end of a knob to the other."""
_NOISE = {"time": 0.2, "memory": 1e-3, "failure": 0.05}
"""Noise of a measurement, as a fraction of the variance."""


def promising(space: Space, trials: Sequence[Trial], bound: int | None, candidates: Sequence[Knobs]) -> int:
    """Return the index of the candidate to try next.

    Args:
        space: the space of the candidates.
        trials: the trials so far; at least one.
        bound: bytes; None for no bound.
        candidates: points that were not tried.
    """
    at = _Predictions(space, candidates)
    failed = [float(trial.status == "failed") for trial in trials]
    worth = np.clip(1.0 - at.predicted(trials, failed, "failure")[0], 0.02, 1.0)
    weighed = [trial for trial in trials if trial.memory]
    if bound is not None and weighed:
        mean, spread = at.predicted(weighed, [math.log(trial.memory or 1) for trial in weighed], "memory")
        worth *= _below((math.log(bound) - mean) / spread)
    timed = [trial for trial in trials if trial.time is not None and trial.time > 0]
    fitting = [trial.time for trial in timed if trial.status == "measured" and trial.time]
    if timed:
        mean, spread = at.predicted(timed, [math.log(trial.time or 1.0) for trial in timed], "time")
        best = math.log(min(fitting)) if fitting else float(mean.max()) + float(spread.max())
        gain = (best - mean) / spread
        worth *= spread * (gain * _below(gain) + np.exp(-0.5 * gain**2) / math.sqrt(2 * math.pi))
    return int(np.argmax(worth))


class _Predictions:
    """Candidates, with predictions for each."""

    def __init__(self, space: Space, candidates: Sequence[Knobs]) -> None:
        self.space, self.candidates = space, candidates

    def predicted(self, trials: Sequence[Trial], values: Sequence[float], kind: str) -> tuple[Array, Array]:
        """Predict mean and standard deviation at each candidate from the values of trials."""
        seen = [trial.knobs for trial in trials]
        y = np.array(values)
        middle, scale = y.mean(), y.std() or 1e-3
        known = self._alike(seen, seen) + _NOISE[kind] * np.eye(len(seen))
        across = self._alike(self.candidates, seen)
        solved = np.linalg.solve(known, np.column_stack([(y - middle) / scale, across.T]))
        variance = 1.0 - np.einsum("ij,ji->i", across, solved[:, 1:])
        return middle + scale * (across @ solved[:, 0]), scale * np.sqrt(np.maximum(variance, 1e-9))

    def _alike(self, some: Sequence[Knobs], others: Sequence[Knobs]) -> Array:
        """Compute the similarities: 1 for the same point, decreasing with distance."""
        near = [self._near(name, knob, some, others) for name, knob in self.space.knobs.items()]
        return _ALONE * sum(near) / len(near) + (1.0 - _ALONE) * np.prod(near, axis=0)

    def _near(self, name: str, knob: Knob, some: Sequence[Knobs], others: Sequence[Knobs]) -> Array:
        a, b = (np.array([_position(knob, point[name]) for point in points]) for points in (some, others))
        apart = np.abs(a[:, None] - b[None, :])
        if isinstance(knob, Choice) and not knob.ordered:
            apart = np.minimum(np.ceil(apart), 1.0)
        return np.exp(-_FALL * np.minimum(apart, 1.0))


def _position(knob: Knob, value: object) -> float:
    """Map a value to a position from 0 to 1.

    The positions of unordered names, and of a knob without effect (−1), are whole numbers apart.
    """
    if value is None and not (isinstance(knob, Choice) and None in knob.values):
        return -1.0
    if isinstance(knob, Choice):
        index = knob.values.index(value)
        return index / max(1, len(knob.values) - 1) if knob.ordered else float(index)
    low, high, at = (math.log(x) if knob.log else x for x in (knob.low, knob.high, float(value)))  # type: ignore[arg-type]
    return (at - low) / ((high - low) or 1.0)


def _below(z: Array) -> Array:
    """Compute the normal cumulative distribution function."""
    return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z])
