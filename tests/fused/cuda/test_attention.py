"""Attention with a mask and grouped keys on a card: one of the fused kernels of torch runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.clock import peak_above
from fused.attention import attention
from tests.fused.cases import Function

pytestmark = pytest.mark.cuda

LENGTH = 1024


def operands(card: torch.device, length: int = LENGTH) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    made = (torch.randn(2, heads, length, 64, device=card, dtype=torch.bfloat16) for heads in (8, 2, 2))
    return tuple(tensor.requires_grad_() for tensor in made)


def padded(card: torch.device, length: int = LENGTH) -> torch.Tensor:
    """A causal mask whose second sequence is hidden in part."""
    mask = torch.full((2, 1, length, length), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16, device=card).triu(
        1
    )
    mask[1, :, length // 2 :, 1:3] = torch.finfo(torch.bfloat16).min
    return mask


@pytest.mark.parametrize(
    ("masked", "kernels"),
    [
        ("causal", [SDPBackend.FLASH_ATTENTION]),
        ("padded", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]),
    ],
)
def test_no_math_kernel(
    real_card: torch.device, masked: str, kernels: list[SDPBackend], record_property: pytest.RecordProperty
) -> None:
    q, k, v = operands(real_card)
    mask = padded(real_card)
    mask = mask[:1] if masked == "causal" else mask

    def step() -> tuple[torch.Tensor, ...]:
        out = attention(q, k, v, None, mask, scale=0.125, enable_gqa=True)
        return torch.autograd.grad(out.sum(), [q, k, v])

    with sdpa_kernel(kernels):  # raises if none of these fits
        peak = peak_above(step, "cuda")
    record_property(f"peak of {masked} GQA, MB", round(peak / 1e6, 1))
    assert peak < q.shape[0] * q.shape[1] * LENGTH * LENGTH * 2, "the scores were in memory"


@pytest.mark.parametrize("rows", [1, 2])
def test_about_as_exact_as_eager(card: torch.device, rows: int) -> None:
    q, k, v = operands(card, 64)
    mask = padded(card, 64)[:rows]

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        k, v = (tensor.repeat_interleave(4, 1) for tensor in (k, v))
        return F.softmax(q @ k.mT * 0.125 + mask, -1) @ v

    def run(function: Function, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = function(*given, mask.to(given[0].dtype))
        return out, *torch.autograd.grad(out, given, torch.ones_like(out))

    exact = run(eager, *(tensor.detach().double().requires_grad_() for tensor in (q, k, v)))
    plain = run(eager, q, k, v)
    ours = run(lambda q, k, v, mask: attention(q, k, v, None, mask, scale=0.125, enable_gqa=True), q, k, v)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert (mine.double() - truth).norm() <= 2 * (theirs.double() - truth).norm()
