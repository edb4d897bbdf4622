"""Comparison of what was observed of two models."""

from __future__ import annotations

import math

import pytest
import torch

from schedule.verify.compare import compare
from schedule.verify.observe import Observation, rms
from schedule.verify.tolerances import TOLERANCES

COMPLEX = torch.complex(torch.ones(8), torch.ones(8))


def test_an_update_that_differs_in_its_imaginary_parts_is_found() -> None:
    reference, other = Observation(updates={"w": COMPLEX}), Observation(updates={"w": COMPLEX.conj().resolve_conj()})
    found = compare(reference, other, TOLERANCES[torch.float32])
    assert [deviation.kind for deviation in found if deviation.excess > 1] == ["update"]


@pytest.mark.parametrize("of", ["outputs", "gradients"])
def test_a_masked_entry_among_ordinary_ones_is_found(of: str) -> None:
    ours = torch.randn(8)
    for value in (math.inf, math.nan, torch.finfo(torch.float32).min):
        theirs = ours.clone()
        theirs[3] = value
        for pair in ((ours, theirs), (theirs, ours)):
            reference, other = (Observation(**{of: {"y": each}}) for each in pair)
            assert compare(reference, other, TOLERANCES[torch.float32])[0].excess > 1


def test_rms_is_over_finite_entries() -> None:
    values = torch.tensor([3.0, -4.0, math.inf, math.nan])
    assert rms(values) == pytest.approx(math.sqrt(12.5))
    assert rms(torch.tensor([3, 4])) == pytest.approx(math.sqrt(12.5))
    assert rms(COMPLEX) == pytest.approx(1.0)
    assert rms(torch.empty(0)) == rms(torch.full((2,), math.nan)) == 0.0
