"""Rules by name, by family, by set; and which of two that overlap is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import schedule
from schedule.rules import Rule, list_rules, select_rules
from schedule.rules.rule import SETS
from tests.rules import test_attention, test_linear, test_loss, test_mutations, test_qkv_merge


def _square(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    return graph.call_function(torch.square, (inputs["x"],))


def test_sets_hold_the_rules_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_ONEDNN", "1")  # a machine where all of them gain something
    assert select_rules("all") == [rule for rule in list_rules() if rule.sets]
    for name in SETS:
        assert select_rules(name) == [rule for rule in list_rules() if name in rule.sets]
    for_time = {"linear_cross_entropy", "linear_cross_entropy_and_logits"}
    assert {rule.name for rule in _only("memory", "default")} == for_time
    assert select_rules(["memory", "default"]) == [*select_rules("memory"), *_only("default", "memory")]


def _only(name: str, but: str) -> list[Rule]:
    return [rule for rule in list_rules() if name in rule.sets and but not in rule.sets]


def test_an_unknown_name_or_set_says_what_there_is() -> None:
    with pytest.raises(schedule.MatchError, match=r"no rule or family 'fast'[\s\S]*default, memory, attention"):
        select_rules("fast")
    with pytest.raises(schedule.MatchError, match="in no set 'fast'"):
        Rule("square", "powers", (lambda x: x * x,), _square, sets=("fast",))


@pytest.mark.unwritable("the rule is registered while the test runs only")
def test_rank_goes_before_size() -> None:
    large = Rule("large", "powers", (lambda x: torch.relu(x * x),), _square)
    for rank, expected in ((0, {"large": 1}), (1, {"small": 1})):
        small = Rule("small", "powers", (lambda x: x * x,), _square, rank=rank)
        model = _Model()
        assert schedule.optimize(model, torch.ones(2), rules=[large, small], cost_guard=False).applied == expected


class _Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * x)


def test_every_family_has_a_mutation() -> None:
    """Those of attention and of merged projections change a call, not a rule, so they name no family."""
    tables = (test_mutations.MUTATIONS, test_linear.MUTATIONS, test_loss.MUTATIONS)
    found = {change[0].family for table in tables for change in table.values()}
    assert test_attention.MUTATIONS and test_qkv_merge.MUTATIONS
    ours = {rule.family for rule in schedule.list_rules() if rule.build.__module__.startswith("schedule.")}
    assert ours == found | {"attention", "qkv_merge"}
