"""Attention that also returns its scores, as in x-transformers: what is returned stays, and the reason says so."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(hidden, -1e4)
        return F.softmax(scores, dim=-1) @ v, scores


class Heedless(nn.Module):
    """Read the scores of neither call."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        attended: Tensor = self.attend(q, k, v, hidden)[0]
        return attended


def given(tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(2, 4, tokens, 8, requires_grad=True) for _ in range(3))
    return q, k, v, torch.ones(tokens, tokens, dtype=torch.bool).triu(1)


def test_scores_that_a_module_returns_are_kept_and_the_reason_says_what_to_do() -> None:
    module = Heedless()
    report = schedule.optimize(module, given(6), cost_guard=False)
    assert not report.applied
    (reason,) = {entry.reason for entry in report.entries if entry.rule == "attention_softmax"}
    assert reason.startswith("softmax alone") and "its scores are returned" in reason and "flatten=True" in reason
    inputs = given(9)
    assert torch.equal(module.attend(*inputs)[1], Attend()(*inputs)[1])


def test_a_flat_graph_leaves_out_scores_that_no_code_reads() -> None:
    module = Heedless()
    twin = copy.deepcopy(module)
    flat = schedule.create_schedule(module, given(6)).trace(flatten=True)
    report = schedule.optimize(flat, cost_guard=False)
    assert [entry.rule for entry in report.select(status="applied")] == ["attention_softmax"]
    for tokens in (6, 9, 1):
        for training in (True, False):
            inputs = given(tokens)
            ours, eager = module.train(training)(*inputs), twin.train(training)(*inputs)
            torch.testing.assert_close(ours, eager)
            gradients = (torch.autograd.grad(out.square().sum(), inputs[:3]) for out in (ours, eager))
            torch.testing.assert_close(*gradients)


def test_scores_that_the_model_returns_stay_in_a_flat_graph_too() -> None:
    module = Attend()
    flat = schedule.create_schedule(module, given(6)).trace(flatten=True)
    assert not schedule.optimize(flat, cost_guard=False).applied
    inputs = given(9)
    torch.testing.assert_close(module(*inputs), Attend()(*inputs))
