"""Distillation on hidden states beside the formulas on full logits: values, gradients, training, memory, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused
from schedule.report.costs import peak_bytes
from tests.fused.cases_distillation import written_out

VOCAB = 37
KINDS = [("jsd", 0.0), ("jsd", 1.0), ("jsd", 0.1), ("jsd", 0.5), ("tvd", 0.5)]


def operands(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The student's hidden states, weight and bias; the teacher's, wider; and a mask."""
    torch.manual_seed(0)
    sizes = [[(3, 5, 8), (VOCAB, 8), (VOCAB,)], [(3, 5, 12), (VOCAB, 12), (VOCAB,)]]
    student, teacher = ([torch.randn(size, dtype=dtype) for size in each] for each in sizes)
    mask = torch.rand(3, 5) > 0.3
    return [each.requires_grad_() for each in student], teacher, mask


def logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return hidden @ weight.T + bias


def reduced(losses: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    if mask is not None:
        losses = torch.where(mask, losses, 0.0)
    count = losses.numel() if mask is None else mask.sum()
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / count}[reduction]


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("masked", [True, False])
def test_values_and_gradients(kind: str, beta: float, reduction: str, masked: bool) -> None:
    student, teacher, mask = operands()
    settings: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": 1.7}
    given = mask if masked else None
    options = {"reduction": reduction, **settings}
    mine = fused.linear_distillation_loss(
        *student[:2], *teacher[:2], given, bias=student[2], teacher_bias=teacher[2], chunk_rows=4, **options
    )
    of_logits = fused.distillation_loss(logits(*student), logits(*teacher), given, **options)
    theirs = reduced(written_out(logits(*student), logits(*teacher), **settings), given, reduction)
    torch.testing.assert_close((mine, of_logits), (theirs, theirs))
    g = torch.rand_like(theirs)
    found = [torch.autograd.grad(each, student, g) for each in (mine, of_logits, theirs)]
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_tokens_that_the_teacher_excludes(kind: str, beta: float) -> None:
    """A logit of -inf is a probability of 0, whose term is 0."""
    student, teacher = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(4, 6).double()
    teacher[:, 2] = -torch.inf
    loss = fused.distillation_loss(student, teacher, kind=kind, beta=beta)
    (gradient,) = torch.autograd.grad(loss, student)
    if beta == 1.0:  # the student gives it some: infinitely far
        assert loss.isinf()
        return
    near = written_out(student, teacher.masked_fill(teacher.isinf(), -1e4), kind, beta).mean()
    torch.testing.assert_close(loss, near)
    torch.testing.assert_close(gradient, torch.autograd.grad(near, student)[0])


def test_rows_that_do_not_count_may_be_anything() -> None:
    student, teacher, mask = operands()
    teacher[0][~mask] = torch.nan
    expected = [each.clone() for each in teacher]
    expected[0][~mask] = 0
    found = [fused.linear_distillation_loss(*student[:2], *each[:2], mask) for each in (teacher, expected)]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(each, student[:2]) for each in found))


class Models(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCAB, features), nn.Linear(features, features)
        self.head = nn.Linear(features, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embed(tokens)))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_twenty_steps_follow_the_written_loss(kind: str, beta: float) -> None:
    torch.manual_seed(0)
    teacher, mine = Models(12), Models(8)
    theirs = copy.deepcopy(mine)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (mine, theirs)]
    for _ in range(20):
        tokens = torch.randint(VOCAB, (4, 6))
        with torch.no_grad():
            hidden = teacher(tokens)
        ours = fused.linear_distillation_loss(
            mine(tokens), mine.head.weight, hidden, teacher.head.weight, kind=kind, beta=beta, chunk_rows=5
        )
        written = written_out(theirs.head(theirs(tokens)), teacher.head(hidden), kind, beta).mean()
        torch.testing.assert_close(ours, written, rtol=1e-4, atol=1e-6)
        for loss, optimizer in zip((ours, written), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_a_second_derivative() -> None:
    student, teacher, _ = operands()

    def of(hidden: Tensor, weight: Tensor) -> Tensor:
        return fused.linear_distillation_loss(hidden, weight, *teacher[:2], beta=0.3, reduction="sum")

    small = [each.detach()[..., :3].requires_grad_() for each in student[:2]]
    small[0] = small[0].detach()[:1, :2].requires_grad_()
    teacher[:2] = [teacher[0][:1, :2], teacher[1]]
    assert torch.autograd.gradgradcheck(of, small)


def test_no_full_logits_in_memory() -> None:
    torch.manual_seed(0)
    rows, features, vocab = 2048, 32, 4096
    hidden, weight = torch.randn(rows, features, requires_grad=True), torch.randn(vocab, features, requires_grad=True)
    teacher = torch.randn(rows, features), torch.randn(vocab, features)

    def run() -> None:
        fused.linear_distillation_loss(hidden, weight, *teacher, chunk_rows=128).backward()

    run()
    assert peak_bytes(run, "cpu") < rows * vocab * 4


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kind": "kl"}, ValueError, "kind must be 'jsd' or 'tvd'"),
        ({"beta": 1.5}, ValueError, "beta must be from 0 to 1"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
        ({"reduction": "batchmean"}, ValueError, "reduction must be"),
        ({"teacher_weight": torch.randn(VOCAB + 1, 12)}, ValueError, "same rows and vocabulary"),
        ({"teacher_hidden": torch.randn(3, 4, 12)}, ValueError, "same rows and vocabulary"),
        ({"teacher_hidden": torch.randn(3, 5, 8)}, ValueError, r"teacher_weight must be \[vocab, 8\]"),
        ({"teacher_bias": torch.randn(3)}, ValueError, "teacher_bias must be"),
        ({"mask": torch.ones(3, 5)}, TypeError, "mask must be boolean"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask must be one for each row"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be 1 or more"),
        ({"weight": torch.randn(VOCAB, 8).half()}, TypeError, "cast one of them"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    student, teacher, _ = operands(torch.float32)
    given = {
        "hidden": student[0],
        "weight": student[1],
        "teacher_hidden": teacher[0],
        "teacher_weight": teacher[1],
    }
    with pytest.raises(error, match=text):
        fused.linear_distillation_loss(**{**given, **changes})
