"""Fifty steps of a transformer on real text: with fused ops the loss curve is eager's."""

from __future__ import annotations

import pytest

import fused
from tests.fused import training


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("backend", "autocast", "tolerance"),
    [
        pytest.param("reference", False, 1e-4, id="float32-reference"),
        pytest.param("reference", True, 3e-2, id="bfloat16-reference"),
        pytest.param("inductor", False, 1e-4, id="float32-inductor"),
        pytest.param("inductor", True, 3e-2, id="bfloat16-inductor", marks=pytest.mark.slow),
    ],
)
def test_the_loss_curve_is_that_of_eager(backend: str, autocast: bool, tolerance: float) -> None:
    with fused.backend(backend):
        curves = training.curves(50, autocast)
    assert curves.plain[-1] < 0.8 * curves.plain[0], "it learns"
    assert curves.apart() <= tolerance


def test_a_wrong_op_leaves_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Fused, "rotary", lambda self, q, k, cos, sin: fused.rotary_embedding(q, k, cos, -sin))
    assert training.curves(20, False).apart() > 2e-2
