"""The properties catch what they are there for: a rule, an undo and a primitive that are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from schedule.core.edits import SetItem, SetSpecializations
from schedule.primitives.registry import registered
from schedule.rules.rule_registry import RULES
from tests.properties import actions
from tests.properties.modules import model_of
from tests.properties.running import Step, check

pytestmark = pytest.mark.unreplayable("what is wrong here is wrong on purpose")

only = settings(max_examples=12, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
"""Enough to find what every other model shows; the smallest example is of no interest here."""

blocks = st.sampled_from(["gelu", "gelu_tanh", "silu"]).map(lambda act: model_of(("mlp", act, True), "tensor"))
numbers = st.tuples(*[st.integers(0, 200)] * 3)


def steps_of(*wanted: Any) -> st.SearchStrategy[list[Step]]:
    """Steps of these actions."""
    kinds = [actions.ACTIONS.index(each) for each in wanted]
    return st.lists(st.tuples(st.sampled_from(kinds), numbers), min_size=3, max_size=6)


def found_wrong(steps: st.SearchStrategy[list[Step]]) -> None:
    """Fails if some run does not keep a property."""

    @only
    @given(blocks, steps)
    def run(model: nn.Module, steps: list[Step]) -> None:
        check(model, steps)

    run()


@contextmanager
def wrong_bias() -> Iterator[None]:
    """The rules that fuse a bias with what follows it take twice the bias."""
    kept = dict(RULES)

    def wrongly(build: Any) -> Any:
        def twice(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
            doubled = graph.call_function(torch.mul, (inputs["bias"], 2)) if "bias" in inputs else None
            return build(graph, {**inputs, "bias": doubled} if doubled else inputs, scalars)

        return twice

    RULES.update({name: dataclasses.replace(rule, build=wrongly(rule.build)) for name, rule in kept.items()})
    try:
        yield
    finally:
        RULES.clear()
        RULES.update(kept)


def test_a_wrong_rule_is_caught() -> None:
    found_wrong(steps_of(actions.optimize))  # as it is, nothing is wrong
    with wrong_bias(), pytest.raises(AssertionError, match="optimize"):
        found_wrong(steps_of(actions.optimize))


def test_an_undo_that_forgets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = steps_of(actions.annotate, actions.optimize)
    found_wrong(wanted)
    monkeypatch.setattr(SetItem, "revert", lambda edit: None)
    with pytest.raises(AssertionError):
        found_wrong(wanted)


def test_a_primitive_that_fails_half_way_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done beside the schedule's edits is not taken back."""
    right = registered()["annotate"]

    def careless(sch: Any, name: str, key: str, value: Any) -> Any:
        for parameter in sch.module.parameters():
            parameter.requires_grad_(False)
        return right(sch, name, key, value)

    monkeypatch.setattr("schedule.api.schedule.Schedule.annotate", careless)
    with pytest.raises(AssertionError):
        found_wrong(steps_of(actions.annotate))


def test_graphs_that_are_not_put_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SetSpecializations, "revert", lambda edit: None)
    with pytest.raises(AssertionError):
        found_wrong(steps_of(actions.optimize))
