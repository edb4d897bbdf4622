"""In-place changes that eager torch allows after what a rule rewrites."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused
from tests.adversary.rewritten import assert_same, results, rewritten


def activated(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = F.linear(x, w)
    y = F.gelu(h + b)
    return y, h.zero_()


def through_a_view(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = F.linear(x, w)
    y = F.gelu(h + b)
    h[0].mul_(3.0)
    return y, h


def input_of_the_module(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 2
    y = F.gelu(x + b)
    x.view(-1).add_(1.0)
    return y, x


def attended(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q = x.view(2, 2, 4, 8)
    out = torch.softmax(q @ q.transpose(-1, -2) * 0.5, -1) @ q
    out.mul_(b)
    return out


def attended_with_a_mask(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q, mask = x.view(2, 2, 4, 8), torch.zeros(2, 1, 4, 4, device=x.device)
    out = torch.softmax(q @ q.transpose(-1, -2) / 2 + mask, -1) @ q
    out += b
    return out


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(16, 8), torch.randn(8, 8), torch.randn(8)]


FORMS = [
    (activated, "all"),
    (through_a_view, "all"),
    (input_of_the_module, "all"),
    (attended, "attention"),
    (attended_with_a_mask, "all"),
]


@pytest.mark.parametrize(("form", "rules"), FORMS)
def test_changes_after_it_that_eager_allows(form: Callable[..., Tensor], rules: str) -> None:
    module, _ = rewritten(form, tensors(), rules)
    with fused.backend("reference"):
        assert_same(results(module, tensors()), results(form, tensors()), torch.float32)


def unsaved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.gelu(F.linear(x, w) + b)
    y.mul_(2.0)
    return y


def test_changes_of_what_nobody_saves_are_no_obstacle() -> None:
    module, count = rewritten(unsaved, tensors(), "bias_gelu")
    assert count == 1
    assert_same(results(module, tensors()), results(unsaved, tensors()), torch.float32)
