"""Dropout on a card: the masks of eager torch, drawn again when a checkpoint recomputes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fused

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 64), (33, 513), (2, 40, 768)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_mask_is_eagers(card: torch.device, shape: tuple[int, ...], dtype: torch.dtype, p: float) -> None:
    x, bias = torch.ones(shape, device=card, dtype=dtype), torch.ones(shape[-1], device=card, dtype=dtype)
    found = []
    for function in (lambda: fused.bias_dropout(x, bias, p), lambda: F.dropout(x + bias, p)):
        torch.manual_seed(5)
        # The draw after it shows whether the generator advanced as far.
        found.append((function() != 0, torch.rand(16, device=card)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_mask_again(card: torch.device, reentrant: bool) -> None:
    x, residual = (torch.randn(16, 64, device=card, requires_grad=True) for _ in range(2))
    bias = torch.randn(64, device=card, requires_grad=True)

    def block(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return fused.bias_dropout_add(x, bias, residual, 0.3, True).square()

    found = []
    for run in (block, lambda *given: checkpoint(block, *given, use_reentrant=reentrant)):
        torch.manual_seed(7)
        out = run(x, bias, residual)
        torch.randn(3, device=card)  # what is drawn in between must not matter
        found.append(
            (out, *torch.autograd.grad(out.sum(), [x, bias, residual])) if not reentrant else _backward(out, x)
        )
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def _backward(out: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient by ``backward``: reentrant checkpoints do not support ``grad``."""
    x.grad = None
    out.sum().backward()
    assert x.grad is not None
    return out, x.grad
