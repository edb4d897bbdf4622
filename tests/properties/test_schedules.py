"""Random models under random schedules: nothing is half done, all can be undone, and the model computes the same."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.properties.modules import models
from tests.properties.programs import programs
from tests.properties.running import KINDS, Step, check, check_rules

few = settings(max_examples=15, suppress_health_check=list(HealthCheck))
many = settings(max_examples=1000, suppress_health_check=list(HealthCheck))

step: st.SearchStrategy[Step] = st.tuples(st.integers(0, KINDS - 1), st.tuples(*[st.integers(0, 200)] * 3))
steps: st.SearchStrategy[list[Step]] = st.lists(step, min_size=1, max_size=8)

RULES = ["default", "all", "attention"]


@pytest.mark.unreplayable("each is replayed already")
@pytest.mark.unwritable("some schedules replace modules by ones with weights")
@few
@given(models, steps)
def test_modules(model: nn.Module, steps: list[Step]) -> None:
    check(model, steps)


@pytest.mark.unreplayable("each is replayed already")
@pytest.mark.unwritable("some schedules replace modules by ones with weights")
@few
@given(programs, steps)
def test_graphs(model: nn.Module, steps: list[Step]) -> None:
    check(model, steps)


@few
@given(models, st.sampled_from(RULES))
def test_rules(model: nn.Module, rules: str) -> None:
    check_rules(model, rules)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("rules", RULES)
def test_many_models_under_rules(rules: str) -> None:
    rewrites = []

    @settings(many, database=None, phases=[Phase.generate])
    @given(models)
    def check_all(model: nn.Module) -> None:
        rewrites.append(check_rules(model, rules))

    check_all()
    assert len(rewrites) == 1000 and sum(map(bool, rewrites)) > 200, sum(map(bool, rewrites))


@pytest.mark.unreplayable("each is replayed already")
@pytest.mark.unwritable("some schedules replace modules by ones with weights")
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_long_schedules() -> None:
    lengths = []

    @settings(many, max_examples=500, database=None, phases=[Phase.generate])
    @given(models, st.lists(step, min_size=10, max_size=14))
    def check_all(model: nn.Module, steps: list[Step]) -> None:
        lengths.append(check(model, steps))

    check_all()
    assert len(lengths) == 500 and sum(length > 2 for length in lengths) >= 150, sorted(lengths)


@pytest.mark.unreplayable("each is replayed already")
@pytest.mark.unwritable("some schedules replace modules by ones with weights")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@many
@given(models, steps)
def test_many_modules(model: nn.Module, steps: list[Step]) -> None:
    check(model, steps)


@pytest.mark.unreplayable("each is replayed already")
@pytest.mark.unwritable("some schedules replace modules by ones with weights")
@pytest.mark.slow
@pytest.mark.timeout(3600)
@many
@given(programs, steps)
def test_many_graphs(model: nn.Module, steps: list[Step]) -> None:
    check(model, steps)
