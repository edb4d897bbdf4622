"""Random models under random schedules: nothing is half done, all can be undone, and the model computes the same."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.properties.modules import models
from tests.properties.programs import programs
from tests.properties.running import KINDS, Step, check

few = settings(max_examples=15, suppress_health_check=list(HealthCheck))
many = settings(max_examples=1000, suppress_health_check=list(HealthCheck))

steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.integers(0, KINDS - 1), st.tuples(*[st.integers(0, 200)] * 3)), min_size=1, max_size=8
)


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
