"""What is taken for rounding by the sweep, and what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from schedule.rules.attention import SDPA_WITHOUT_WEIGHTS
from tests.zoo import batch, build
from tests.sweep.rounding import agrees_in_float64


@pytest.mark.unwritable("a rule of the test stands in for the registered one")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("error", "agrees"), [(0.0, True), (1e-4, False)])
def test_a_scale_that_is_off_is_not_rounding(error: float, agrees: bool) -> None:
    def build_scaled(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        made = SDPA_WITHOUT_WEIGHTS.build(graph, inputs, scalars)
        made[0].kwargs = {**made[0].kwargs, "scale": made[0].kwargs["scale"] * (1 + error)}
        return made

    rule = replace(SDPA_WITHOUT_WEIGHTS, build=build_scaled)
    assert agrees_in_float64(build("gpt2"), [batch("gpt2")], 1, [rule]) == agrees
