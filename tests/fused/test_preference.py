"""Preference losses against their published formulas on full logits: values, gradients, training, memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused
from schedule.report.costs import peak_bytes

BATCH, TOKENS, FEATURES, VOCAB = 4, 6, 8, 37


def operands(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, TOKENS, FEATURES, generator=generator, dtype=dtype)
    weight = torch.randn(VOCAB, FEATURES, generator=generator, dtype=dtype) / 2
    bias = torch.randn(VOCAB, generator=generator, dtype=dtype)
    targets = torch.randint(VOCAB, (BATCH, TOKENS), generator=generator)
    targets[0, 3:] = targets[2, :1] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets, bias.requires_grad_()


def written_tokens(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor, temperature: float = 1.0) -> Tensor:
    logits = (hidden @ weight.T + bias) / temperature
    found = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets == -100, 0.0, found)


def written_sequences(*given: Tensor, average: bool = False) -> Tensor:
    total = written_tokens(*given).sum(-1)
    return total / (given[2] != -100).sum(-1) if average else total


def same(mine: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    g = torch.randn_like(theirs)
    pairs = zip(torch.autograd.grad(mine, inputs, g), torch.autograd.grad(theirs, inputs, g), strict=True)
    for gradient, expected in pairs:
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [None, 5])
def test_token_log_probs(temperature: float, chunk_rows: int | None) -> None:
    given = operands(0)
    mine = fused.token_log_probs(*given, temperature=temperature, chunk_rows=chunk_rows)
    same(mine, written_tokens(*given, temperature), given[0], given[1], given[3])


@pytest.mark.parametrize("average", [False, True])
def test_sequence_log_probs(average: bool) -> None:
    given = operands(1)
    mine = fused.sequence_log_probs(*given, average=average)
    same(mine, written_sequences(*given, average=average), given[0], given[1], given[3])


def test_a_sequence_without_targets_has_none() -> None:
    hidden, weight, targets, bias = operands(2)
    targets[:] = -100
    result = fused.sequence_log_probs(hidden, weight, targets, bias, average=True)
    assert torch.equal(result, torch.zeros(BATCH, dtype=result.dtype))
    assert not torch.autograd.grad(result.sum(), hidden)[0].any()


def numbers(count: int, *sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = [-3 * torch.rand(*(sizes or (BATCH,)), generator=generator, dtype=torch.float64) for _ in range(count)]
    return [each.requires_grad_() for each in drawn]


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _margin(c: Tensor, r: Tensor, ref_c: Tensor, ref_r: Tensor) -> Tensor:
    """Compute π(chosen)/π_ref(chosen) over π(rejected)/π_ref(rejected), in logarithms."""
    return torch.log(torch.exp(c) / torch.exp(ref_c) / (torch.exp(r) / torch.exp(ref_r)))


WRITTEN: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sigmoid": (
        lambda *p: fused.dpo_loss(*p, beta=0.3),
        lambda *p: -torch.log(sigma(0.3 * _margin(*p))).mean(),
    ),
    "smoothed": (
        lambda *p: fused.dpo_loss(*p, beta=0.3, label_smoothing=0.2),
        lambda *p: -(0.8 * torch.log(sigma(0.3 * _margin(*p))) + 0.2 * torch.log(sigma(-0.3 * _margin(*p)))).mean(),
    ),
    "hinge": (
        lambda *p: fused.dpo_loss(*p, beta=0.9, kind="hinge"),
        lambda *p: (1 - 0.9 * _margin(*p)).clamp(min=0).mean(),
    ),
    "ipo": (
        lambda *p: fused.dpo_loss(*p, beta=0.2, kind="ipo"),
        lambda *p: ((_margin(*p) - 2.5) ** 2).mean(),
    ),
    "simpo": (
        lambda c, r, *_: fused.simpo_loss(c, r, beta=2.0, margin=0.7),
        lambda c, r, *_: -torch.log(sigma(2 * c - 2 * r - 0.7)).mean(),
    ),
    "orpo": (
        lambda c, r, *_: fused.orpo_loss(c, r, beta=0.25),
        lambda c, r, *_: (
            -0.25 * torch.log(sigma(torch.log((c.exp() / (1 - c.exp())) / (r.exp() / (1 - r.exp()))))).mean()
        ),
    ),
    "kto": (
        lambda c, r, ref_c, ref_r: fused.kto_loss(
            c, ref_c, DESIRABLE, 0.4, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5
        ),
        lambda c, r, ref_c, ref_r: (
            sum(
                1.5 * (1 - sigma(0.3 * (a - b - 0.4))) if good else 0.5 * (1 - sigma(0.3 * (0.4 - (a - b))))
                for a, b, good in zip(c, ref_c, DESIRABLE, strict=True)
            )
            / BATCH
        ),
    ),
}
DESIRABLE = torch.tensor([True, False, False, True])


@pytest.mark.parametrize("name", WRITTEN)
def test_losses_of_sequences(name: str) -> None:
    mine, written = WRITTEN[name]
    c, r, ref_c, ref_r = numbers(4)
    learned = (c, r) if name != "kto" else (c,)
    same(mine(c, r, ref_c, ref_r), written(c, r, ref_c.detach(), ref_r.detach()), *learned)
    assert not torch.allclose(mine(r, c, ref_r, ref_c), written(c, r, ref_c, ref_r), rtol=1e-4)


@pytest.mark.parametrize("value", [-1e-7, -1e-3, -0.69, -0.7, -30.0, -200.0])
def test_odds_do_not_cancel(value: float) -> None:
    chosen = torch.tensor([value], requires_grad=True)
    loss = fused.orpo_loss(chosen, torch.tensor([-1.0]), beta=1.0)
    exact = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    log_odds = exact - torch.log(-torch.expm1(exact)) - (-1.0 - math.log(-math.expm1(-1.0)))
    expected = F.softplus(-log_odds).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (mine,), (theirs,) = torch.autograd.grad(loss, chosen), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)


def _written_grpo(
    lp: Tensor, adv: Tensor, old: Tensor, ref: Tensor, mask: Tensor, low: float, up: float, beta: float, by_seq: bool
) -> Tensor:
    rows = []
    for s in range(BATCH):
        row = []
        for t in range(TOKENS):
            if mask[s, t]:
                ratio = torch.exp(lp[s, t]) / torch.exp(old[s, t])
                clipped = min(max(ratio, 1 - low), 1 + up)
                gain = min(ratio * adv[s], clipped * adv[s])
                odds = torch.exp(ref[s, t]) / torch.exp(lp[s, t])
                row.append(-gain + beta * (odds - torch.log(odds) - 1))
        rows.append(row)
    if by_seq:
        return sum(sum(row) / len(row) for row in rows if row) / BATCH
    return sum(map(sum, rows)) / sum(map(len, rows))


@pytest.mark.parametrize("by_sequence", [True, False])
@pytest.mark.parametrize(("clip_above", "beta"), [(None, 0.0), (0.28, 0.04)])
def test_grpo(by_sequence: bool, clip_above: float | None, beta: float) -> None:
    log_probs, reference = numbers(2, BATCH, TOKENS)
    old = (log_probs + 0.5 * torch.randn(BATCH, TOKENS, generator=torch.Generator().manual_seed(1))).detach()
    advantages = torch.tensor([1.0, -1.0, 0.3, -0.2], dtype=torch.float64)
    mask = torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[1] = False
    options = {"clip": 0.2, "clip_above": clip_above, "beta": beta, "by_sequence": by_sequence}
    mine = fused.grpo_loss(log_probs, advantages, old, reference, mask, **options)
    same(
        mine,
        _written_grpo(log_probs, advantages, old, reference, mask, 0.2, clip_above or 0.2, beta, by_sequence),
        log_probs,
    )


def test_grpo_of_the_policy_that_drew_the_tokens() -> None:
    """The ratio is 1, so that the gradient is that of the plain policy gradient."""
    (log_probs,) = numbers(1, BATCH, TOKENS)
    advantages = torch.tensor([1.0, -1.0, 0.3, -0.2], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(fused.grpo_loss(log_probs, advantages), log_probs)
    torch.testing.assert_close(gradient, (-advantages / (BATCH * TOKENS)).unsqueeze(-1).expand_as(log_probs))


BAD: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "beta": (ValueError, "beta must be above 0, got 0", lambda: fused.dpo_loss(*numbers(4), beta=0)),
    "nan": (ValueError, "beta must be above 0", lambda: fused.simpo_loss(*numbers(2), beta=math.nan)),
    "shape": (ValueError, r"rejected must have the shape", lambda: fused.orpo_loss(numbers(1)[0], numbers(1, 3)[0])),
    "kind": (ValueError, "kind must be", lambda: fused.dpo_loss(*numbers(4), kind="other")),  # type: ignore[arg-type]
    "smoothing": (ValueError, "label_smoothing", lambda: fused.dpo_loss(*numbers(4), kind="ipo", label_smoothing=0.1)),
    "half": (ValueError, "label_smoothing", lambda: fused.dpo_loss(*numbers(4), label_smoothing=0.5)),
    "integers": (TypeError, "chosen must be float", lambda: fused.simpo_loss(DESIRABLE.long(), DESIRABLE.long())),
    "desirable": (TypeError, "must be boolean", lambda: fused.kto_loss(*numbers(2), DESIRABLE.long(), 0.0)),
    "no reference": (ValueError, "needs the reference", lambda: fused.grpo_loss(*numbers(2), beta=0.1)),
    "clip": (ValueError, "clip must be", lambda: fused.grpo_loss(*numbers(2), clip=2.0)),
    "advantages": (ValueError, "advantages must have", lambda: fused.grpo_loss(*numbers(2, BATCH, TOKENS))),
    "mask": (
        TypeError,
        "mask must be boolean",
        lambda: fused.grpo_loss(numbers(1, BATCH, TOKENS)[0], numbers(1)[0], mask=torch.ones(BATCH, TOKENS)),
    ),
    "temperature": (ValueError, "temperature must be", lambda: fused.token_log_probs(*operands(0), temperature=0.0)),
    "both": (ValueError, "soft cap", lambda: fused.token_log_probs(*operands(0), temperature=2.0, softcap=5.0)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    error, text, call = BAD[name]
    with pytest.raises(error, match=text):
        call()


class Policy(nn.Module):
    """A language model with a head, as small as one can be."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, FEATURES)
        self.mixer = nn.GRU(FEATURES, FEATURES, batch_first=True)
        self.head = nn.Linear(FEATURES, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mixer(self.embedding(tokens))[0]


def _log_probs(model: Policy, tokens: Tensor, average: bool, chunked: bool) -> Tensor:
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    given = (model(tokens), model.head.weight, targets, model.head.bias)
    return (fused.sequence_log_probs if chunked else written_sequences)(*given, average=average)


def _loss(name: str, policy: Policy, reference: Policy, tokens: Tensor, chunked: bool) -> Tensor:
    average = name in ("simpo", "orpo", "ipo")
    both = _log_probs(policy, tokens, average, chunked)
    with torch.no_grad():
        refs = _log_probs(reference, tokens, average, chunked)
    chosen, rejected = both.chunk(2)
    args = (chosen, rejected, *refs.chunk(2))
    if name == "kto":
        args = (both, both, refs, refs)
    return WRITTEN[name][0 if chunked else 1](*args)


@pytest.mark.parametrize("name", WRITTEN)
def test_twenty_steps_follow_the_curve_of_full_logits(name: str) -> None:
    torch.manual_seed(0)
    start, curves = Policy().double(), []
    batches = [torch.randint(VOCAB, (BATCH if name == "kto" else 2 * BATCH, 9)) for _ in range(20)]
    for chunked in (True, False):
        policy, reference = copy.deepcopy(start), copy.deepcopy(start)
        optimizer, curve = torch.optim.AdamW(policy.parameters(), lr=0.02), []
        for tokens in batches:
            loss = _loss(name, policy, reference, tokens, chunked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append((torch.tensor(curve), [each.detach() for each in policy.parameters()]))
    torch.testing.assert_close(*curves, rtol=1e-7, atol=1e-9)
    assert curves[0][0].std() > 1e-3


def test_a_step_needs_no_full_logits() -> None:
    """Those of the policy alone take six times what the whole step does here."""
    vocab, rows = 4096, 8192
    hidden = torch.randn(4, rows // 4, 16, requires_grad=True)
    weight, targets = torch.randn(vocab, 16, requires_grad=True), torch.randint(vocab, (4, rows // 4))

    def step() -> None:
        log_probs = fused.sequence_log_probs(hidden, weight, targets)
        fused.dpo_loss(*log_probs.chunk(2), *log_probs.detach().chunk(2)).backward()

    assert peak_bytes(step, "cpu") < rows * vocab * 4 / 6
