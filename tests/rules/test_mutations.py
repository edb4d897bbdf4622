"""A rule that is wrong in any of the usual ways is caught, by its proof and by comparing models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fused
import schedule
from schedule.optimizer import optimize
from schedule.rules import Rule, prove
from schedule.rules.attention_softmax import ATTENTION_SOFTMAX
from schedule.rules.bias_activation import GELU_TANH
from tests.zoo import batch, build

Change = Callable[[fx.Node], None]


def mutated(rule: Rule, change: Change) -> Rule:
    """``rule`` with a mistake in the call that it inserts."""

    def build_wrongly(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
        node = rule.build(graph, inputs, scalars)
        change(node)
        return node

    return Rule(
        rule.name,
        rule.family,
        rule.patterns,
        build_wrongly,
        rule.proof,
        objection=rule.objection,
        futile=rule.futile,
    )


def argument(index: int, value: Any) -> Change:
    """Another positional argument."""
    return lambda node: node.update_arg(index, value)


def option(name: str, value: Any) -> Change:
    """Another keyword argument, where it is given."""

    def change(node: fx.Node) -> None:
        if name in node.kwargs:
            node.update_kwarg(name, value)

    return change


def doubled_scale(node: fx.Node) -> None:
    scale = node.args[2]
    node.update_arg(2, scale * 2 if isinstance(scale, float) else 2.0)


def detached_mask(node: fx.Node) -> None:
    if isinstance(node.args[1], fx.Node):
        with node.graph.inserting_before(node):
            node.update_arg(1, node.graph.call_method("detach", (node.args[1],)))


def twice_the_bias(node: fx.Node) -> None:
    if isinstance(node.args[1], fx.Node):
        with node.graph.inserting_before(node):
            node.update_arg(1, node.graph.call_function(torch.mul, (node.args[1], 2)))


MUTATIONS: dict[str, tuple[Rule, Change]] = {
    "wrong scale": (ATTENTION_SOFTMAX, doubled_scale),
    "mask dropped": (ATTENTION_SOFTMAX, argument(1, None)),
    "mask without gradient": (ATTENTION_SOFTMAX, detached_mask),
    "dropout skipped": (ATTENTION_SOFTMAX, option("dropout_p", 0.0)),
    "other dropout": (ATTENTION_SOFTMAX, option("dropout_p", 0.5)),
    "missing bias": (GELU_TANH, argument(1, None)),
    "bias twice": (GELU_TANH, twice_the_bias),
    "erf for tanh": (GELU_TANH, argument(2, "gelu")),
    "other activation": (GELU_TANH, argument(2, "silu")),
}
ON_GPT2 = sorted(MUTATIONS.keys() - {"mask without gradient"})  # its mask is no parameter


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches(name: str) -> None:
    rule, change = MUTATIONS[name]
    assert prove(mutated(rule, change)), f"{name} went through"


@pytest.mark.parametrize("name", ON_GPT2)
@pytest.mark.filterwarnings("ignore")
def test_verify_catches_and_names_the_step(name: str) -> None:
    rule, change = MUTATIONS[name]
    model, inputs = build("gpt2"), batch("gpt2")
    if name == "missing bias":
        for block in model.transformer.h:
            torch.nn.init.normal_(block.mlp.c_fc.bias)
    sch = schedule.create_schedule(model, inputs)
    others = [each for each in schedule.list_rules() if each.name != rule.name]
    optimize(sch, rules=others, cost_guard=False)
    with fused.backend("reference"):
        schedule.verify(sch, inputs, steps=1)
        optimize(sch, rules=[mutated(rule, change)], cost_guard=False)
        with pytest.raises(schedule.VerificationError, match=rule.name):
            schedule.verify(sch, inputs, steps=1)


def test_a_rule_without_a_proof_says_so() -> None:
    with pytest.raises(ValueError, match="has no proof"):
        prove(dataclasses.replace(GELU_TANH, proof=None))


def test_a_lookalike_that_matches_fails_the_proof() -> None:
    proof = dataclasses.replace(GELU_TANH.proof, refused=(lambda x, b: F.gelu(x + b, approximate="tanh"),))  # type: ignore
    failures = prove(dataclasses.replace(GELU_TANH, proof=proof))
    assert [failure.form for failure in failures] == ["refused 0"]
