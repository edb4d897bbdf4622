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
    for_memory = {"linear_cross_entropy", "linear_cross_entropy_and_logits"}
    for_memory |= {"called_layer_norm", "called_scaled_layer_norm"}
    for_memory |= {rule.name for rule in list_rules("recomputed_input")}
    assert {rule.name for rule in _only("memory", "default")} == for_memory
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


@pytest.mark.unwritable("rules that are not registered")
def test_a_declined_match_leaves_its_nodes_to_a_smaller_one_of_its_rank() -> None:
    def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        return graph.call_function(torch.special.expit, (inputs["x"],))

    def thrice(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        return graph.call_function(torch.mul, (graph.call_function(torch.special.expit, (inputs["x"],)), 3.0))

    large = Rule("large", "one", (lambda x: torch.sigmoid(x) * 3.0,), thrice, profitability=lambda match: "too small")
    small = Rule("small", "other", (lambda x: torch.sigmoid(x),), build)

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(x) * 3.0

    for rules in ([large, small], [small, large]):
        report = schedule.optimize(Gate(), torch.randn(2, 4), rules=rules)
        assert report.applied == {"small": 1}
        assert [entry.reason for entry in report.entries if entry.rule == "large"] == ["too small"]
    assert schedule.optimize(Gate(), torch.randn(2, 4), rules=[large, small], cost_guard=False).applied == {"large": 1}


def test_every_family_has_a_mutation() -> None:
    """Those of attention and of merged projections change a call, not a rule, so they name no family."""
    tables = (test_mutations.MUTATIONS, test_linear.MUTATIONS, test_loss.MUTATIONS)
    found = {change[0].family for table in tables for change in table.values()}
    assert test_attention.MUTATIONS and test_qkv_merge.MUTATIONS
    ours = {rule.family for rule in schedule.list_rules() if rule.build.__module__.startswith("schedule.")}
    assert ours == found | {"attention", "qkv_merge"}
