"""Products by oneDNN: where rules put them, what other rules keep, and machines that differ."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fused
import schedule
from schedule.rules import Rule, prove, select_rules
from schedule.rules.linear import LINEAR, LINEAR_BIAS
from schedule.rules.proof import failures_of
from tests.rules.test_mutations import argument, mutated, twice_the_bias
from tests.zoo import batch, build

BOTH = [LINEAR_BIAS.name, LINEAR.name]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"),
]


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where oneDNN is faster, at any size."""
    monkeypatch.setenv("FUSED_ONEDNN", "1")
    monkeypatch.setattr(importlib.import_module("fused.linear"), "LEAST_PRODUCTS", 1)


def calls(model: nn.Module, sch: schedule.Schedule) -> int:
    """Calls of the fused op in the graphs for training."""
    graphs = [made.graph for m in model.modules() for made in sch.tree.graphs.current(m) or () if made.training]
    return sum(node.target is fused.linear for graph in graphs for node in graph.nodes)


# -- proofs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [LINEAR, LINEAR_BIAS], ids=lambda rule: rule.name)
def test_the_proof_holds_with_the_products_of_onednn(rule: Rule) -> None:
    failures = prove(rule)
    assert not failures, "\n".join(map(str, failures))


def _not_turned(node: fx.Node) -> None:
    """A matrix taken for a weight."""
    weight = node.args[1]
    if isinstance(weight, fx.Node) and weight.target == "t":
        node.update_arg(1, weight.args[0])


def _bias_twice(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        node.update_arg(2, node.graph.call_function(torch.mul, (node.args[2], 2)))


MUTATIONS: dict[str, tuple[Rule, Callable[[fx.Node], None]]] = {
    "bias dropped": (LINEAR_BIAS, argument(2, None)),
    "bias twice": (LINEAR_BIAS, _bias_twice),
    "matrix for weight": (LINEAR, _not_turned),
    "matrix for weight, with a bias": (LINEAR_BIAS, _not_turned),
    "weight doubled": (LINEAR, twice_the_bias),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches(name: str) -> None:
    assert any(failures_of(mutated(*MUTATIONS[name]))), f"{name} went through"


# -- in models --------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "products"), [("gpt2", 9), ("bert", 14), ("llama", 15), ("t5", 33), ("vit", 13)])
def test_every_linear_of_a_model_is_one_call(name: str, products: int) -> None:
    model, inputs = build(name), batch(name)
    sch = schedule.create_schedule(model, inputs)
    report = sch.optimize(cost_guard=False)
    assert calls(model, sch) == products and set(BOTH) & set(report.applied)
    schedule.verify(sch, inputs, steps=3)
    again = sch.optimize(cost_guard=False)
    assert not again.applied
    while sch.history:
        sch.undo()
    assert calls(model, sch) == 0


def test_a_bias_that_another_rule_takes_stays_with_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    report = schedule.optimize(model, torch.randn(4, 8), cost_guard=False)
    assert report.applied == {"bias_gelu": 1, "linear": 1, "linear_bias": 1}


def test_a_bias_that_another_rule_declines_stays_in_the_product() -> None:
    """The GELU does not pay at this size; the sum is not left alone for it."""
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU())
    report = schedule.optimize(model, torch.randn(512, 256))
    assert report.applied == {"linear_bias": 1}
    assert [(entry.rule, entry.status) for entry in report.entries if entry.status == "declined"] == [
        ("bias_gelu", "declined")
    ]


def test_small_products_are_declined_by_name() -> None:
    report = schedule.optimize(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8))
    assert not report.applied
    assert "too small: 256 multiplications, profitable from 16,777,216" in str(report.entries)


class Branches(nn.Module):
    """What looks like a linear layer, and what is none of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.other = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x, self.weight, beta=0.5)
        z = torch.matmul(x.unsqueeze(0), x.t().unsqueeze(0))
        half = nn.functional.linear(x.double(), self.weight.double())
        wide = nn.functional.linear(x, self.weight[:1]) + self.bias
        return y + z.sum() + half.float() + wide + self.other


def test_lookalikes_are_left_alone() -> None:
    """Of float64 or scaled nothing is said; a sum that is no bias leaves the product."""
    model = Branches()
    sch = schedule.create_schedule(model, torch.randn(4, 8))
    report = sch.optimize(rules=BOTH, cost_guard=False, strict=True)
    assert report.applied == {"linear": 1} and len(report.entries) == 1
    schedule.verify(sch, torch.randn(4, 8), steps=2)


def test_other_rules_still_see_a_linear_layer() -> None:
    model, inputs = build("llama"), batch("llama")
    sch = schedule.create_schedule(model, inputs)
    sch.optimize(rules=BOTH, cost_guard=False)
    report = sch.optimize(rules=["memory", "qkv_merge"], cost_guard=False)
    assert report.applied["linear_cross_entropy_and_logits"] == 1 and report.applied["qkv_merge"] == 2
    schedule.verify(sch, inputs, steps=2)


def test_autocast_and_other_dtypes_run_as_before() -> None:
    model, inputs = build("bert").eval(), batch("bert")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(**inputs).logits
    schedule.optimize(model, inputs, rules=BOTH, cost_guard=False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)
    twin = build("bert").eval().double()
    model.double()
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, twin(**inputs).logits, rtol=1e-12, atol=1e-12)


# -- machines ---------------------------------------------------------------------------------------------------


def test_sets_leave_out_what_gains_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for rules in ("default", "all"):
        assert {LINEAR, LINEAR_BIAS} <= set(select_rules(rules))
    monkeypatch.setenv("FUSED_ONEDNN", "0")
    for rules in ("default", "all"):
        assert not {LINEAR, LINEAR_BIAS} & set(select_rules(rules))
    assert select_rules("linear") == [LINEAR] and select_rules(BOTH) == [LINEAR_BIAS, LINEAR]


def test_asked_for_by_name_they_are_applied_anywhere_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_ONEDNN", "0")
    model, inputs = build("llama").eval(), batch("llama")
    expected = model(**inputs).logits
    assert schedule.optimize(model, inputs, rules=BOTH, cost_guard=False).applied == {"linear": 15}
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(("written", "replayed"), [("1", "0"), ("0", "1")])
def test_a_recipe_does_the_same_on_another_machine(
    written: str, replayed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_ONEDNN", written)
    inputs = batch("bert")
    sch = schedule.create_schedule(build("bert"), inputs)
    sch.optimize(cost_guard=False)
    recipe = sch.recipe()
    monkeypatch.setenv("FUSED_ONEDNN", replayed)
    again: Any = schedule.replay(build("bert"), recipe, inputs)
    assert [str(step) for step in again.history] == [str(step) for step in sch.history]
    assert again.recipe().to_json() == recipe.to_json()
    assert calls(again.module, again) == (14 if written == "1" else 0)
