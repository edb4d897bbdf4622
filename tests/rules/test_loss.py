"""Losses: what is caught, what becomes of the logits, what is kept for the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
import schedule
from schedule.report.costs import measure
from schedule.rules import Rule
from schedule.rules.cross_entropy import CROSS_ENTROPY
from schedule.rules.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_AND_LOGITS
from schedule.rules.proof import failures_of
from tests.zoo import batch, build

Change = Callable[..., None]
MEMORY = [LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_AND_LOGITS]


def mutated(rule: Rule, change: Change) -> Rule:
    """``rule`` with a mistake in what it inserts: the loss, and the logits if they are outputs."""

    def build_wrongly(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        made = rule.build(graph, inputs, scalars)
        change(*made) if isinstance(made, tuple) else change(made)
        return made

    return dataclasses.replace(rule, build=build_wrongly)


def with_option(name: str, value: Any) -> Change:
    return lambda loss, *_: loss.update_kwarg(name, value)


def without_bias(loss: fx.Node) -> None:
    loss.args = loss.args[:3]


def twice_the_logits(loss: fx.Node, logits: fx.Node) -> None:
    with logits.graph.inserting_before(logits):
        logits.update_arg(0, logits.graph.call_function(torch.mul, (logits.args[0], 2)))


MUTATIONS: dict[str, tuple[Rule, Change, str]] = {
    "smoothed": (CROSS_ENTROPY, with_option("label_smoothing", 0.1), "gpt2"),
    "sum for mean": (CROSS_ENTROPY, with_option("reduction", "sum"), "bert"),
    "label ignored": (CROSS_ENTROPY, with_option("ignore_index", 5), ""),
    "bias of the head dropped": (LINEAR_CROSS_ENTROPY, without_bias, ""),  # most heads have none
    "twice the logits": (LINEAR_CROSS_ENTROPY_AND_LOGITS, twice_the_logits, "llama"),
    "sum of the rows": (LINEAR_CROSS_ENTROPY_AND_LOGITS, with_option("reduction", "sum"), "t5"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches(name: str) -> None:
    rule, change, _ = MUTATIONS[name]
    try:
        failed = any(failures_of(mutated(rule, change)))
    except IndexError:  # a label that is not ignored any more
        return
    assert failed, f"{name} went through"


@pytest.mark.one_in(3)
@pytest.mark.unwritable("a wrong rule stands in for the registered one")
@pytest.mark.parametrize("name", [name for name, (*_, model) in MUTATIONS.items() if model])
@pytest.mark.filterwarnings("ignore")
def test_verify_catches_and_names_the_step(name: str) -> None:
    rule, change, architecture = MUTATIONS[name]
    inputs = batch(architecture)
    sch = schedule.create_schedule(build(architecture), inputs)
    with fused.backend("reference"):
        assert sch.optimize(rules=[mutated(rule, change)], cost_guard=False).applied
        with pytest.raises(schedule.VerificationError, match=rule.name):
            schedule.verify(sch, inputs, steps=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "t5"])
@pytest.mark.parametrize("rules", [["cross_entropy"], ["loss"]], ids=["cross_entropy", "loss"])
@pytest.mark.filterwarnings("ignore")
def test_the_losses_of_transformers_are_rewritten(architecture: str, rules: list[str]) -> None:
    inputs = batch(architecture)
    sch = schedule.create_schedule(build(architecture), inputs)
    applied = sch.optimize(rules=rules, cost_guard=False).applied
    head = rules == ["loss"] and architecture != "bert"  # BERT's head is a module with parts of its own
    assert applied == {"linear_cross_entropy_and_logits" if head else "cross_entropy": 1}
    schedule.verify(sch, inputs, steps=1)


@pytest.mark.filterwarnings("ignore")
def test_logits_stay_an_output_and_are_not_saved() -> None:
    model, inputs = build("gpt2").eval(), batch("gpt2", rows=4, length=32)
    with torch.no_grad():
        expected = model(**inputs)
    before = measure(model, inputs).saved_bytes
    schedule.optimize(model, inputs, rules=MEMORY, cost_guard=False)
    after = measure(model, inputs).saved_bytes
    logits = expected.logits.numel() * 4
    assert logits * 0.9 < before - after < logits * 1.1
    found = model(**inputs)
    assert torch.equal(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    twin = build("gpt2").eval()
    gradients = []
    for each in (model, twin):
        each.zero_grad()
        each(**inputs).logits.square().sum().backward()
        gradients.append(each.get_parameter("lm_head.weight").grad)
    torch.testing.assert_close(*gradients)


class Head(nn.Module):
    """Gives the loss alone, divided by a number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden)
        return F.cross_entropy(logits.float().view(-1, 16), labels.view(-1), reduction="sum") / 4


def test_logits_that_nothing_reads_are_never_whole() -> None:
    torch.manual_seed(0)
    model, hidden, labels = Head(), torch.randn(2, 5, 8), torch.randint(0, 16, (2, 5))
    expected = model(hidden, labels)
    sch = schedule.create_schedule(model, (hidden, labels))
    assert sch.optimize(rules="memory", cost_guard=False).applied == {"linear_cross_entropy": 1}
    called = [node.target for node in sch.graph.nodes if node.op in ("call_function", "call_module")]
    assert fused.linear_cross_entropy in called and F.linear not in called and "head" not in called
    torch.testing.assert_close(model(hidden, labels), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_16_bits_are_as_in_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, hidden, labels = Head(), torch.randn(2, 5, 8), torch.randint(0, 16, (2, 5))
    with torch.autocast("cpu", dtype):
        expected = model(hidden, labels)
    schedule.optimize(model, (hidden, labels), rules="memory", cost_guard=False)
    with torch.autocast("cpu", dtype):
        found = model(hidden, labels)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_few_rows_are_declined() -> None:
    report = schedule.optimize(Head(), (torch.randn(1, 5, 8), torch.zeros(1, 5, dtype=torch.long)), rules=MEMORY)
    assert not report.applied and "few rows: 5 of 8 features" in str(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", ["wrapped", "hooked"])
def test_a_head_that_is_changed_afterwards_counts(change: str) -> None:
    """A Linear without a bias is a call that the rule consumes, not a module that it opens."""
    model, inputs = build("llama"), batch("llama")
    torch.nn.init.normal_(model.lm_head.weight)
    expected = model(**inputs).logits
    report = schedule.optimize(model, inputs, rules="memory", cost_guard=False)
    assert report.applied["linear_cross_entropy_and_logits"] == 1
    seen: list[Tensor] = []
    if change == "hooked":
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    else:
        model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())
    logits = model(**inputs).logits
    assert logits is seen[0] if change == "hooked" else logits.abs().max() <= 1 < expected.abs().max()
