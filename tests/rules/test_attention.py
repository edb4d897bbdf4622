"""Torch's own attention: what is caught, what becomes of the weights, of rows that are hidden whole."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import schedule
from fused.attention import attention, attention_and_weights
from schedule.rules import Rule
from schedule.rules.attention import SDPA, SDPA_WITHOUT_WEIGHTS
from schedule.rules.proof import failures_of
from tests.zoo import batch, build

Change = Callable[[fx.Node], None]


def mutated(rule: Rule, change: Change) -> Rule:
    """``rule`` with a mistake in the attention that it inserts."""

    def build_wrongly(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        made = rule.build(graph, inputs, scalars)
        node = made[0] if isinstance(made, tuple) else made
        while node.target not in (attention, attention_and_weights):
            node = node.args[0]
        change(node)
        return made

    return dataclasses.replace(rule, build=build_wrongly)


def with_option(name: str, value: Any) -> Change:
    return lambda node: node.update_kwarg(name, value)


def causal_attention(*operands: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(*operands, is_causal=True, scale=scale)


def causal_attention_and_weights(*operands: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return causal_attention(*operands, scale=scale), operands[0]


def causal(node: fx.Node) -> None:
    node.target = causal_attention if node.target is attention else causal_attention_and_weights
    node.kwargs = {"scale": node.kwargs["scale"]}


def values_for_keys(node: fx.Node) -> None:
    q, k, v = node.args
    node.args = (q, v, k)


MUTATIONS: dict[str, tuple[Change, str]] = {
    "default scale": (with_option("scale", 1.0), "gpt2"),
    "other scale": (with_option("scale", 0.4), "gpt2"),
    "mask dropped": (with_option("attn_mask", None), "bert"),
    "dropout skipped": (with_option("dropout_p", 0.0), "gpt2"),
    "causal for the mask": (causal, "llama"),
    "sink dropped": (with_option("sink", None), ""),  # no model of the zoo has it
    "values for keys": (values_for_keys, "llama"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches(name: str) -> None:
    change, _ = MUTATIONS[name]
    assert any(failures_of(mutated(SDPA, change))), f"{name} went through"


@pytest.mark.one_in(3)
@pytest.mark.unwritable("a wrong rule stands in for the registered one")
@pytest.mark.parametrize("name", [name for name, (_, model) in MUTATIONS.items() if model])
@pytest.mark.filterwarnings("ignore")
def test_verify_catches_and_names_the_step(name: str) -> None:
    change, architecture = MUTATIONS[name]
    inputs = batch(architecture)
    sch = schedule.create_schedule(build(architecture), inputs)
    assert sch.optimize(rules=[mutated(SDPA_WITHOUT_WEIGHTS, change)], cost_guard=False).applied
    with pytest.raises(schedule.VerificationError, match="sdpa_without_weights"):
        schedule.verify(sch, inputs, steps=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "t5"])
@pytest.mark.filterwarnings("ignore")
def test_attention_of_transformers_is_rewritten(architecture: str) -> None:
    inputs = batch(architecture)
    sch = schedule.create_schedule(build(architecture), inputs)
    found = {"gpt2": 2, "llama": 2, "bert": 2, "t5": 6}[architecture]
    assert sch.optimize(rules="attention", cost_guard=False).applied == {"sdpa_without_weights": found}
    schedule.verify(sch, inputs, steps=1)


def test_no_set_but_its_own_has_it() -> None:
    for rule in (SDPA, SDPA_WITHOUT_WEIGHTS):
        assert rule.sets == ("attention",)


class Attention(nn.Module):
    def __init__(self, returns: str = "") -> None:
        super().__init__()
        self.returns = returns

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        weights = F.softmax(q @ k.transpose(-1, -2) * 0.5 + mask, dim=-1)
        out = weights @ v
        return {"": out, "weights": (out, weights), "mean": (out, weights.mean(1))}[self.returns]


def tensors(tokens: int = 6) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, tokens, 8, requires_grad=True) for _ in range(3)]


class Wrapper(nn.Module):
    """What calls an attention, and what it does with the weights."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.attention, self.reads = Attention("weights"), reads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        out, weights = self.attention(q, k, v, mask)
        if self.reads == "shape":
            return out * weights.shape[-1]
        if self.reads == "entropy":
            return out, {"entropy": (weights * weights.log()).sum()}
        return (out, [weights]) if self.reads == "returned" else out


@pytest.mark.parametrize(("returns", "rule"), [("", "sdpa"), ("weights", None), ("mean", None)])
def test_weights_that_are_read_stay(returns: str, rule: str | None) -> None:
    module, given = Attention(returns), (*tensors(), torch.zeros(2, 1, 6, 6))
    report = schedule.optimize(module, given, rules="attention", cost_guard=False)
    assert report.applied == ({rule: 1} if rule else {})


@pytest.mark.parametrize("reads", ["shape", "entropy", "returned"])
def test_weights_that_a_module_around_reads_or_the_root_returns_stay(reads: str) -> None:
    module, given = Wrapper(reads), (*tensors(), torch.zeros(2, 1, 6, 6))
    expected = module(*given)
    report = schedule.optimize(module, given, rules="attention", cost_guard=False)
    (left,) = [entry for entry in report.entries if entry.rule == "sdpa_without_weights"]
    assert not report.applied and left.path == "attention" and "is read outside of the module" in left.reason
    torch.testing.assert_close(module(*given), expected)
    assert schedule.optimize(module, given, rules="all", cost_guard=False).applied == {"attention_softmax": 1}
    torch.testing.assert_close(module(*given), expected)


def test_weights_that_nobody_reads_are_there_for_whoever_does() -> None:
    module, given = Wrapper(), (*tensors(), torch.zeros(2, 1, 6, 6))
    expected, (_, theirs) = module(*given), module.attention(*given)
    report = schedule.optimize(module, given, rules="attention", cost_guard=False)
    assert report.applied == {"sdpa_without_weights": 1}
    torch.testing.assert_close(module(*given), expected)
    _, ours = module.attention(*given)
    assert type(ours) is not Tensor and isinstance(ours, Tensor) and not ours.is_leaf
    torch.testing.assert_close(ours, theirs)
    first = torch.autograd.grad(theirs.square().sum(), given[:2], create_graph=True)
    again = torch.autograd.grad(ours.square().sum(), given[:2], create_graph=True)
    torch.testing.assert_close(again, first)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), given[:2])
    torch.testing.assert_close(torch.autograd.grad(sum(g.square().sum() for g in again), given[:2]), second)
    with torch.no_grad():
        _, ours = module.attention(*given)
        assert torch.equal(pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours))
        assert torch.equal(torch.tensor(ours.numpy()), torch.tensor(ours.tolist())) and repr(ours).startswith(
            "tensor(["
        )
        ours.zero_()
        assert not ours.any()


def test_a_hook_reads_the_weights_of_a_call_that_drops_some_of_them() -> None:
    class Dropping(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
            weights = F.dropout(F.softmax(q @ k.transpose(-1, -2) + mask, dim=-1), 0.5, self.training)
            return weights @ v, weights

    module, given = Wrapper(), (*tensors(), torch.zeros(2, 1, 6, 6))
    module.attention = Dropping()
    twin, seen = copy.deepcopy(module), list[Tensor]()
    assert schedule.optimize(module, given, rules="attention", cost_guard=False).applied == {"sdpa_without_weights": 1}
    for each in (module, twin):
        each.attention.register_forward_hook(lambda module, args, output: seen.append(output[1]))
        torch.manual_seed(0)
        each(*given)
    torch.testing.assert_close(*seen)
    assert type(seen[0]) is Tensor and (seen[0] == 0).any()


def test_weights_of_changed_operands_are_refused() -> None:
    module, given = Wrapper(), (*tensors(), torch.zeros(2, 1, 6, 6))
    schedule.optimize(module, given, rules="attention", cost_guard=False)
    with torch.no_grad():
        _, weights = module.attention(*given)
        given[1].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        weights.sum()


def test_a_module_around_weights_that_were_not_kept_is_scheduled_again() -> None:
    """What is asked of every object, such as whether it is a named tuple, does not count as reading the weights."""
    model, inputs = build("bert"), batch("bert")
    assert schedule.optimize(model, inputs, rules="attention", cost_guard=False).applied
    again = schedule.optimize(model, inputs, rules="all", cost_guard=False)
    assert again.applied and not again.select("attention")


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf])
def test_rows_hidden_whole(fill: float) -> None:
    module, (q, k, v) = Attention(), tensors()
    mask = torch.zeros(2, 1, 6, 6)
    mask[1, :, 2] = mask[0, :, :, 4:] = fill
    expected = module(q, k, v, mask)
    schedule.optimize(module, (q, k, v, mask), rules="attention", cost_guard=False)
    torch.testing.assert_close(module(q, k, v, mask), expected, equal_nan=True)


def test_the_weights_are_not_saved() -> None:
    module, given = Attention(), (*tensors(64), torch.zeros(2, 1, 64, 64))
    weights = 2 * 3 * 64 * 64
    assert largest_saved(module, given) == weights
    schedule.optimize(module, given, rules="attention", cost_guard=False)
    assert largest_saved(module, given) < weights


def largest_saved(module: nn.Module, given: tuple[Tensor, ...]) -> int:
    """Elements of the largest tensor that is kept for the backward pass."""
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*given)
    return max(saved)


def test_dropout_on_the_cpu_is_declined() -> None:
    class Dropping(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
            return F.dropout(F.softmax(q @ k.transpose(-1, -2) + mask, dim=-1), 0.1, self.training) @ v

    report = schedule.optimize(Dropping(), (*tensors(), torch.zeros(2, 1, 6, 6)), rules="attention")
    assert not report.applied and "with dropout" in " ".join(entry.reason for entry in report.entries)
