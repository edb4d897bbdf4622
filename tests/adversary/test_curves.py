"""A scheduled model trains like an untouched one, whatever tool trains it: the same losses, the same parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from schedule.rules import Rule, register_rule, rule_for, unregister_rule
from tests.adversary.curves import Curve, Run, compare, observed
from tests.adversary.ways import WAYS, compiled

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.unreplayable("tools change the model beside the schedule"),
]

NAMES = ["gpt2", "llama", "bert", "t5"]
RULES = ["default", "all"]

_NO_WEIGHTS = r"returns \d tensors instead of|attention weights were never made"
"""A call that differs from the recorded ones runs attention as it was written: see the rule ``attention``."""

_NO_CACHE = r"\['(past_key_values|cache)'\] is missing"  # transformers renamed it in 5.24
_CHECKPOINTING = rf"{_NO_CACHE}|has a hook|the graph made for it does not take it"
DOCUMENTED = {
    "LoRA, then schedule": "nothing of what was rewritten occurs",
    "schedule, then LoRA": "nothing of what was rewritten occurs",
    "checkpointing": _CHECKPOINTING,
    "checkpointing, reentrant": _CHECKPOINTING,
    "checkpoint around layers": f"{_NO_CACHE}|has a forward of its own",
    "checkpoint around layers, reentrant": f"{_NO_CACHE}|has a forward of its own",
}
"""Fallbacks that ``docs/internals.md`` announces, under "Calls that differ from the recorded ones"."""

TOLERANCES = {"autocast": dict(loss=5e-3, update=0.2)}
"""bfloat16 keeps 8 bits: one step is off by up to 3e-4, twenty by 2e-3; a ReLU at zero turns whole gradients."""


@cache
def twin(way: str, name: str) -> Curve:
    """What the untouched model does."""
    return observed(WAYS[way], Run(name, None))


def cases() -> list[Any]:
    """Each tool with one model and one set of rules; the other pairs take longer and are marked slow."""
    found = []
    for place, way in enumerate(WAYS):
        for number, (name, rules) in enumerate((name, rules) for rules in RULES for name in NAMES):
            slow = number != (5 * place) % 8
            marks: list[Any] = [pytest.mark.slow] if slow else []
            found.append(pytest.param(way, name, rules, marks=marks, id=f"{way}-{name}-{rules}"))
    return found


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("way", "name", "rules"), cases())
def test_trains_alike(way: str, name: str, rules: str) -> None:
    documented = "|".join([DOCUMENTED.get(way, "(?!)"), *([_NO_WEIGHTS] if rules == "all" else [])])
    ours = observed(WAYS[way], Run(name, rules))
    compare(ours, twin(way, name), documented=documented, **TOLERANCES.get(way, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("rules", RULES)
def test_trains_alike_compiled(name: str, rules: str) -> None:
    compare(observed(compiled, Run(name, rules)), observed(compiled, Run(name, None)))


# -- the comparison can fail --------------------------------------------------------------------------------


def _wrong(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> fx.Node:
    right: Rule = rule_for("bias_gelu_tanh")  # type: ignore[assignment]
    return graph.call_function(torch.mul, (right.build(graph, inputs, scalars), 1.5))


@contextmanager
def mutated() -> Iterator[str]:
    """Register a rule whose result is half too large; its name."""
    right: Rule = rule_for("bias_gelu_tanh")  # type: ignore[assignment]
    register_rule(dataclasses.replace(right, name="wrong_gelu", family="wrong", build=_wrong, sets=()))
    try:
        yield "wrong_gelu"
    finally:
        unregister_rule("wrong_gelu")


@pytest.mark.one_in(3)
@pytest.mark.unwritable("the rule is registered while the test runs only")
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] if place % 2 else []) for place, way in enumerate(WAYS)],
)
def test_a_wrong_constant_shows(way: str) -> None:
    with mutated() as rule:
        ours = observed(WAYS[way], Run("gpt2", [rule]))
    with pytest.raises(AssertionError, match="differ"):
        compare(ours, twin(way, "gpt2"), documented="", **TOLERANCES.get(way, {}))
