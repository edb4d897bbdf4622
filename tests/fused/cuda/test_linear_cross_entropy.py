"""linear_cross_entropy on a card: small gradients in float16, captured, compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused
from benchmarks.gpu.clock import peak_above, relative_error

pytestmark = pytest.mark.cuda


def operands(card: torch.device, rows: int, features: int, classes: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, features), torch.randn(classes, features) / features
    made = [tensor.to(card, dtype).requires_grad_() for tensor in (hidden, weight)]
    return [*made, torch.randint(classes, (rows,), device=card)]


def test_small_gradients_survive_in_float16(card: torch.device) -> None:
    hidden, weight, targets = operands(card, 8192 if card.type == "cuda" else 64, 32, 3000, torch.float16)
    scaler = torch.amp.GradScaler(card.type, init_scale=2.0**16)
    loss = fused.linear_cross_entropy(hidden, weight, targets)
    found = [g.double() / 2.0**16 for g in torch.autograd.grad(scaler.scale(loss), [hidden, weight])]
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, targets), wide)
    assert relative_error(found, exact) < 2e-3


def test_a_training_step_is_captured(real_card: torch.device) -> None:
    hidden, weight, targets = operands(real_card, 300, 64, 1000, torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        loss = fused.linear_cross_entropy(hidden, weight, targets, chunk_rows=128)
        return (loss.detach(), *torch.autograd.grad(loss, [hidden, weight]))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.neg_()
    graph.replay()
    for mine, plain in zip(captured, step(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)


def test_compiled_code_never_holds_the_logits(real_card: torch.device, record_property: pytest.RecordProperty) -> None:
    hidden, weight, targets = operands(real_card, 4096, 256, 32000, torch.bfloat16)
    compiled = torch.compile(fused.linear_cross_entropy, fullgraph=True)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(compiled(hidden, weight, targets), [hidden, weight])

    step()
    peak = peak_above(step, "cuda")
    record_property("peak of linear cross entropy under torch.compile, MB", round(peak / 1e6, 1))
    assert peak < 0.7 * 4096 * 32000 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_the_weight_is_in_memory_once(real_card: torch.device, dtype: torch.dtype) -> None:
    hidden, weight, targets = operands(real_card, 4096, 1024, 32768, dtype)
    fused.linear_cross_entropy(hidden, weight, targets)  # torch's own workspaces come with the first product
    loss: list[torch.Tensor] = []
    peak = peak_above(lambda: loss.append(fused.linear_cross_entropy(hidden, weight, targets)), "cuda")
    assert peak < 2.3 * 4 * weight.numel(), "the gradient, and the logits of a chunk"
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, targets), wide)
    eager = torch.autograd.grad(F.cross_entropy((hidden @ weight.T).float(), targets), [hidden, weight])
    for mine, theirs, truth in zip(torch.autograd.grad(loss[0], [hidden, weight]), eager, exact, strict=True):
        assert (mine - truth).square().mean() <= 1.21 * (theirs - truth).square().mean()
