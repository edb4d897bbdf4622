"""Deviations of simulated ranks: what is not finite hides nothing."""

from __future__ import annotations

import math

import pytest
import torch

from schedule.api.simulate import _apart

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "expected, got, deviation",
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([2.0, NAN], [1.0, NAN], 0.5),
        ([2.0, NAN], [2.0, 1.0], INF),
        ([2.0, INF], [1.0, INF], 0.5),
        ([2.0, INF], [2.0, -INF], INF),
        ([1.0, -3e38], [1.0, -2e38], 0.0),
    ],
)
def test_the_largest_relative_difference(expected: list[float], got: list[float], deviation: float) -> None:
    assert _apart(torch.tensor(expected), torch.tensor(got)) == deviation
