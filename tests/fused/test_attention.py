"""How attention on an accelerator is handed to torch's kernels; the numbers are tested with the rule and on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fused import attention as module

LOWEST = torch.finfo(torch.float32).min
LENGTH = 6


def causal(length: int = LENGTH) -> torch.Tensor:
    return torch.full((1, 1, length, length), LOWEST).triu(1)


def changed(position: tuple[int, int], value: float) -> torch.Tensor:
    mask = causal()
    mask[0, 0][position] = value
    return mask


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the last call of torch's attention."""
    seen: dict[str, Any] = {}
    attention = F.scaled_dot_product_attention

    def watched(q, k, v, mask, p, **options: Any) -> torch.Tensor:
        seen.update(options, keys=k.shape[1], mask=mask)
        return attention(q, k, v, mask, p, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    return seen


def run(mask: torch.Tensor | None) -> None:
    """Compare with the expression: as on an accelerator, of four heads that share two of keys."""
    q, k, v = (torch.randn(2, heads, LENGTH, 8) for heads in (4, 2, 2))
    found = module._by_kernel((q, k, v, None, mask), mask, 0.0, 0.5, True)
    k, v = (tensor.repeat_interleave(2, 1) for tensor in (k, v))
    expected = F.softmax(q @ k.mT * 0.5 + (0 if mask is None else mask), -1) @ v
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_a_causal_mask_becomes_a_setting(handed_over: dict[str, Any]) -> None:
    run(causal())
    assert handed_over["mask"] is None and handed_over["is_causal"]
    assert handed_over["enable_gqa"] and handed_over["keys"] == 2


@pytest.mark.parametrize(
    "mask",
    [
        changed((3, 1), -1.0),
        changed((1, 3), 0.0),
        changed((1, 3), -100.0),
        causal().repeat(2, 1, 1, 1).index_fill(3, torch.tensor(0), 1.0),
    ],
    ids=["less seen", "more seen", "hidden in part", "added to"],
)
def test_under_any_other_mask_keys_are_repeated(handed_over: dict[str, Any], mask: torch.Tensor) -> None:
    run(mask)
    assert handed_over["mask"] is not None and not handed_over["is_causal"]
    assert not handed_over["enable_gqa"] and handed_over["keys"] == 4


def test_without_a_mask_keys_are_shared(handed_over: dict[str, Any]) -> None:
    run(None)
    assert handed_over["enable_gqa"] and not handed_over["is_causal"] and handed_over["keys"] == 2


def test_what_is_not_provably_causal() -> None:
    assert module._is_causal(causal(), LENGTH)
    assert module._is_causal(torch.full((2, 1, 3, 3), -torch.inf).triu(1), 3)
    assert not module._is_causal(causal().requires_grad_(), LENGTH), "its gradient is wanted"
    assert not module._is_causal(causal(LENGTH + 1)[:, :, 1:], LENGTH), "fewer queries than keys"
    assert not module._is_causal(causal()[:, :, :1], LENGTH), "broadcast over queries"


def test_a_row_without_a_key_is_written_out() -> None:
    q, k, v = (torch.randn(1, 2, LENGTH, 8, requires_grad=True) for _ in range(3))
    mask = causal().index_fill(2, torch.tensor(2), LOWEST)
    assert module._by_kernel((q, k, v, None, mask), mask, 0.0, 1.0, False) is None


@pytest.mark.parametrize(
    "operands",
    [
        lambda x: (x, x, x),
        lambda x: (x, F.normalize(x, dim=-1), x.flip(-1)),
        lambda x: (x.tanh(), x, x),
        lambda x: (x[:, :1].expand_as(x), x, x.sin()),
    ],
    ids=["one tensor", "of each other", "keys are values", "views"],
)
def test_gradients_of_both_orders_where_operands_are_computed_from_each_other(operands: Any) -> None:
    def derivatives(attention: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 7, 16, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(attention(*operands(x)).sin().sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sin().sum(), x)]

    ours = derivatives(lambda q, k, v: module.attention(q, k, v, None, None, scale=0.25))
    torch.testing.assert_close(ours, derivatives(lambda q, k, v: F.softmax(q @ k.mT * 0.25, -1) @ v))
