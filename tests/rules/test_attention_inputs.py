"""Torch's own attention on filled scores and grouped queries; and what it cannot express."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, fx, nn

import schedule
import schedule.runtime.scheduled
from fused.attention import attention, attention_and_weights
from schedule.rules.attention import SDPA
from schedule.rules.attention_inputs import repetition
from schedule.rules.proof import failures_of
from tests.zoo import batch, build


class Attention(nn.Module):
    """``scores`` makes what is softmaxed of q·kᵀ and a boolean mask; ``heads`` what attends of keys and values."""

    def __init__(self, scores: Callable[[Tensor, Tensor], Tensor], heads: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.scores, self.heads = scores, heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        if self.heads is not None:
            k, v = self.heads(k), self.heads(v)
        return F.softmax(self.scores(q @ k.transpose(-1, -2) * 0.5, hidden), dim=-1) @ v


def given(tokens: int, heads: int = 4) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(2, n, tokens, 8, requires_grad=True) for n in (4, heads, heads))
    return q, k, v, torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def sdpa_call(module: nn.Module) -> fx.Node | None:
    state = schedule.runtime.state_of(module)
    nodes = [node for made in state.specializations for node in made.graph.nodes] if state is not None else []
    return next((node for node in nodes if node.target in (attention, attention_and_weights)), None)


def check(module: nn.Module, heads: int = 4) -> fx.Node | None:
    """Rewritten if it can be, and equal in values and gradients at several lengths, in train and eval."""
    twin = copy.deepcopy(module)
    sch = schedule.create_schedule(module, given(6, heads))
    sch.optimize(rules="attention", cost_guard=False)
    rewritten = sdpa_call(module)
    for tokens in (6, 9, 1):
        for mode in (True, False):
            inputs = given(tokens, heads)
            module.train(mode)
            ours, eager = module(*inputs), twin(*inputs)
            torch.testing.assert_close(ours, eager)
            mine, other = (torch.autograd.grad(out.square().sum(), inputs[:3]) for out in (ours, eager))
            torch.testing.assert_close(mine, other)
    return rewritten


LOWEST = torch.finfo(torch.float32).min
FILLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "masked_fill, -inf": (lambda s, hidden: s.masked_fill(hidden, -math.inf), True),
    "masked_fill, lowest": (lambda s, hidden: s.masked_fill(hidden, LOWEST), True),
    "in place": (lambda s, hidden: s.masked_fill_(hidden, LOWEST), True),
    "where": (lambda s, hidden: torch.where(hidden, LOWEST, s), True),
    "where, a tensor": (lambda s, hidden: torch.where(~hidden, s, torch.full([], LOWEST)), True),
    "another number": (lambda s, hidden: s.masked_fill(hidden, -9.0), False),
    "nothing hidden but 0": (lambda s, hidden: s.masked_fill(hidden, 0.0), False),
    "the other way round": (lambda s, hidden: torch.where(hidden, s, 1.0), False),
    "of another tensor": (lambda s, hidden: torch.where(hidden, s, s * 2), False),
}


@pytest.mark.parametrize("name", FILLS)
def test_filled_scores(name: str) -> None:
    scores, fits = FILLS[name]
    assert (check(Attention(scores)) is not None) is fits


def repeat(x: Tensor) -> Tensor:
    batch, heads, tokens, features = x.shape
    return x[:, :, None, :, :].expand(batch, heads, 2, tokens, features).reshape(batch, heads * 2, tokens, features)


HEADS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "expand and reshape": (repeat, True),
    "unsqueeze": (lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2), True),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=1), True),
    "heads in turns": (lambda x: x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2), False),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), False),
}


@pytest.mark.parametrize("name", HEADS)
def test_repeated_heads_are_taken_once(name: str) -> None:
    heads, once = HEADS[name]
    call = check(Attention(lambda s, hidden: s, heads), heads=2)
    assert call is not None and call.kwargs.get("enable_gqa", False) is once
    left = {node.target for node in call.graph.nodes} & {"expand", "repeat_interleave", "reshape"}
    assert not (once and left)


@pytest.mark.filterwarnings("ignore")
def test_grouped_queries_of_llama_are_not_repeated() -> None:
    model, inputs = build("llama"), batch("llama")
    sch = schedule.create_schedule(model, inputs)
    assert sch.optimize(rules="attention", cost_guard=False).applied == {"sdpa_without_weights": 2}
    for layer in model.model.layers:
        call = sdpa_call(layer.self_attn)
        assert call is not None and call.kwargs["enable_gqa"]
        assert not [node for node in call.graph.nodes if node.target == "expand"]
    schedule.verify(sch, inputs, steps=1)


def capped(s: Tensor, hidden: Tensor) -> Tensor:
    return torch.tanh(s / 5.0) * 5.0


class Sinks(Attention):
    def __init__(self) -> None:
        super().__init__(lambda s, hidden: s)
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * 0.5
        s = torch.cat([s, self.sinks.reshape(1, -1, 1, 1).expand(*q.shape[:-1], 1)], dim=-1)
        s = s - s.max(dim=-1, keepdim=True).values
        return F.softmax(s, dim=-1)[..., :-1] @ v


def test_what_it_cannot_express_is_declined() -> None:
    report = schedule.optimize(Attention(capped), given(6), rules="attention", cost_guard=False)
    assert not report.applied
    assert [entry.status for entry in report.entries if "capped softly" in entry.reason] == ["declined"]


def test_a_sink_is_one_more_key() -> None:
    module = Sinks()
    twin = copy.deepcopy(module)
    call = check(module)
    assert call is not None and call.kwargs["sink"] is not None
    inputs = given(9)
    ours, eager = (torch.autograd.grad(each(*inputs).square().sum(), each.sinks) for each in (module, twin))
    torch.testing.assert_close(ours, eager)


MUTATIONS: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "not filled": lambda inputs, scalars: inputs.update(filled_hidden=None, filled_kept=None),
    "filled with 0": lambda inputs, scalars: scalars.update(filled_number=0.0),
    "filled elsewhere": lambda inputs, scalars: inputs.update(
        filled_kept=inputs.get("filled_hidden"), filled_hidden=inputs.get("filled_kept")
    ),
    "values of another head": lambda inputs, scalars: repetition(scalars, "k") and inputs.update(v=inputs["k"]),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches(name: str) -> None:
    def build_wrongly(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
        inputs, scalars = dict(inputs), dict(scalars)
        MUTATIONS[name](inputs, scalars)
        return SDPA.build(graph, inputs, scalars)

    assert SDPA.proof is not None
    proof = dataclasses.replace(SDPA.proof, dtypes=(torch.float64,), forms=SDPA.proof.forms[4:])
    assert any(failures_of(dataclasses.replace(SDPA, build=build_wrongly, proof=proof)))


@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_returned_are_declined_with_the_reason_too() -> None:
    config = hf.Gemma2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    report = schedule.optimize(model, batch("llama"), rules="attention", cost_guard=False)
    assert not report.applied and "capped softly" in " ".join(entry.reason for entry in report.entries)
