"""A rule that is wrong in any of the usual ways is caught, by its proof and by comparing models."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fused
import schedule
from schedule.api.optimize import optimize
from schedule.rules import Rule, prove, select_rules
from schedule.rules.adaptive_norm import ADAPTIVE_LAYER_NORM
from schedule.rules.attention_softmax import ATTENTION_SOFTMAX
from schedule.rules.batch_norm import BATCH_NORM_ADD, BATCH_NORM_RELU, BATCH_NORM_SILU
from schedule.rules.batch_norm_folding import CONV_BATCH_NORM, CONV_BATCH_NORM_RELU
from schedule.rules.bias_activation import GELU_TANH, MISH
from schedule.rules.bias_dropout import BIAS_DROPOUT, BIAS_DROPOUT_ADD
from schedule.rules.gated import SILU
from schedule.rules.gated_residual import GATED_RESIDUAL
from schedule.rules.group_norm import GROUP_NORM_SCALE_SHIFT, GROUP_NORM_SILU
from schedule.rules.layer_norm import (
    ADD_LAYER_NORM,
    CALLED_LAYER_NORM,
    CALLED_SCALED_LAYER_NORM,
    LAYER_NORM,
    SCALED_LAYER_NORM,
)
from schedule.rules.proof import failures_of
from schedule.rules.recomputed_input import RECOMPUTED_CONVOLUTIONS, RECOMPUTED_LINEAR, RECOMPUTED_LINEAR_BIAS
from schedule.rules.rms_norm import ADD_LLAMA, GEMMA, LLAMA
from schedule.rules.rotary import INTERLEAVED, ROTARY
from schedule.rules.star_relu import STAR_RELU
from schedule.rules.unit_scale import UNIT_SCALE
from tests.zoo import batch, build

Change = Callable[[fx.Node], None]


def mutated(rule: Rule, change: Change) -> Rule:
    """``rule`` with a mistake in the call that it inserts."""

    def build_wrongly(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        made = rule.build(graph, inputs, scalars)
        first = made if isinstance(made, fx.Node) else made[0]
        change(first.all_input_nodes[0] if first.target is operator.getitem else first)
        return made

    return Rule(
        rule.name,
        rule.family,
        rule.patterns,
        build_wrongly,
        rule.proof,
        extra_check=rule.extra_check,
        no_gain=rule.no_gain,
        rank=rule.rank,
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


def set_option(name: str, value: Any) -> Change:
    """A keyword argument, given or not."""
    return lambda node: node.update_kwarg(name, value)


def swapped_angles(node: fx.Node) -> None:
    node.args = (*node.args[:-2], node.args[-1], node.args[-2])


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


def swapped(first: int, second: int) -> Change:
    """Two positional arguments in each other's place."""

    def change(node: fx.Node) -> None:
        args = list(node.args)
        args[first], args[second] = args[second], args[first]
        node.args = tuple(args)

    return change


MUTATIONS: dict[str, tuple[Rule, Change, str]] = {
    "wrong scale": (ATTENTION_SOFTMAX, doubled_scale, "gpt2"),
    "mask dropped": (ATTENTION_SOFTMAX, argument(1, None), "gpt2"),
    "fill left out": (ATTENTION_SOFTMAX, option("fill", None), ""),  # no model of the zoo fills
    "other fill": (ATTENTION_SOFTMAX, option("fill", -1.0), ""),
    "mask without gradient": (ATTENTION_SOFTMAX, detached_mask, ""),  # no model's mask is a parameter
    "dropout skipped": (ATTENTION_SOFTMAX, option("dropout_p", 0.0), "gpt2"),
    "other dropout": (ATTENTION_SOFTMAX, option("dropout_p", 0.5), "gpt2"),
    "missing bias": (GELU_TANH, argument(1, None), "gpt2"),
    "bias twice": (GELU_TANH, twice_the_bias, "gpt2"),
    "erf for tanh": (GELU_TANH, argument(2, "gelu"), "gpt2"),
    "other activation": (GELU_TANH, argument(2, "silu"), "gpt2"),
    "bias of Mish dropped": (MISH, argument(1, None), ""),  # no model of the zoo has it
    "other eps": (LLAMA, argument(2, 1e-2), "llama"),
    "weight dropped": (LLAMA, argument(1, None), ""),  # new models have weights of 1
    "weight for weight + 1": (GEMMA, option("casting", "torch"), "gemma3"),
    "one summand twice": (ADD_LLAMA, lambda node: node.update_arg(1, node.args[0]), "llama"),
    "weight for bias": (LAYER_NORM, swapped(1, 2), ""),
    "bias dropped": (ADD_LAYER_NORM, argument(3, None), ""),
    "sum of another": (ADD_LAYER_NORM, lambda node: node.update_arg(0, node.args[1]), "gpt2"),
    "weight for bias of a batch norm": (BATCH_NORM_RELU, swapped(3, 4), ""),  # the zoo has no batch norms
    "other eps of a batch norm": (BATCH_NORM_SILU, argument(7, 0.1), ""),
    "residual dropped": (BATCH_NORM_ADD, option("residual", None), ""),
    "bias of a folded layer dropped": (CONV_BATCH_NORM, argument(2, None), ""),
    "mean for variance": (CONV_BATCH_NORM_RELU, swapped(3, 4), ""),
    "other groups": (GROUP_NORM_SILU, argument(1, 1), ""),  # no model of the zoo has group norms
    "scale left out": (GROUP_NORM_SCALE_SHIFT, option("scale", None), ""),
    "no activation": (GROUP_NORM_SILU, option("activation", None), ""),
    "shift for scale": (ADAPTIVE_LAYER_NORM, swapped(1, 2), ""),  # nor adaptive ones
    "value for residual": (GATED_RESIDUAL, swapped(0, 1), ""),
    "bias for scale": (STAR_RELU, swapped(1, 2), ""),
    "one summand twice, without its scale": (UNIT_SCALE, lambda node: node.update_arg(1, node.args[0]), ""),
    "gate dropped": (GATED_RESIDUAL, lambda node: node.update_arg(2, node.args[1]), ""),
    "up for gate": (SILU, lambda node: node.args[2:] and swapped(0, 1)(node), "llama"),
    "gelu for silu": (SILU, lambda node: node.args[2:] and node.update_arg(2, "gelu"), ""),
    "bias of dropout dropped": (BIAS_DROPOUT, argument(1, None), ""),  # new models have biases of 0
    "less dropout": (BIAS_DROPOUT, argument(2, 0.05), "gpt2"),
    "other residual": (BIAS_DROPOUT_ADD, lambda node: node.update_arg(2, node.args[0]), "bert"),
    "sin for cos": (ROTARY, swapped_angles, "llama"),
    "other pairs": (ROTARY, set_option("interleaved", True), ""),
    "halves for pairs": (INTERLEAVED, set_option("interleaved", False), "gptj"),
    "more dropout": (BIAS_DROPOUT_ADD, argument(3, 0.5), ""),
    "no bias where the input is computed again": (RECOMPUTED_LINEAR_BIAS, argument(2, None), ""),
    "weight doubled": (RECOMPUTED_LINEAR, twice_the_bias, "llama"),
    "other groups of a convolution": (RECOMPUTED_CONVOLUTIONS[1], argument(5, 1), ""),
    "weight of a called norm dropped": (CALLED_LAYER_NORM, argument(1, None), ""),
    "weight for bias of a scaled norm": (SCALED_LAYER_NORM, swapped(2, 3), ""),
    "weight of a scaled norm dropped": (CALLED_SCALED_LAYER_NORM, argument(1, None), ""),
}


_FIRST = {rule.family: name for name, (rule, _, model) in reversed(MUTATIONS.items()) if model}
IN_MODELS = [
    pytest.param(name, marks=() if name in _FIRST.values() else pytest.mark.slow)
    for name, (*_, model) in MUTATIONS.items()
    if model
]
"""Mutations of rules that a model of the zoo has; one of each family in every run."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches(name: str) -> None:
    rule, change, _ = MUTATIONS[name]
    assert rule.proof is not None
    assert next(failures_of(mutated(rule, change)), None), f"{name} went through"


@pytest.mark.one_in(3)
@pytest.mark.unwritable("a wrong rule stands in for the registered one")
@pytest.mark.parametrize("name", IN_MODELS)
@pytest.mark.filterwarnings("ignore")
def test_verify_catches_and_names_the_step(name: str) -> None:
    rule, change, architecture = MUTATIONS[name]
    model, inputs = build(architecture), batch(architecture)
    if name == "missing bias":
        for block in model.transformer.h:
            torch.nn.init.normal_(block.mlp.c_fc.bias)
    sch = schedule.create_schedule(model, inputs)
    others = [each for each in select_rules("default") if each.family != rule.family and each.rank >= rule.rank]
    with fused.backend("reference"):
        optimize(sch, rules=others, cost_guard=False)
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
