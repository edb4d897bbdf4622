"""Rows of scores that a mask hides whole are what eager torch makes of them, in values and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import fused
import schedule
from fused.attention import attention
from tests.adversary.rewritten import rewritten

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FILLS: dict[str, Callable[[torch.dtype], float]] = {
    "lowest": lambda dtype: torch.finfo(dtype).min,
    "-inf": lambda dtype: -math.inf,
    "-1e4": lambda dtype: -1e4,
}


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2)) * 0.5 + mask
    return torch.matmul(F.softmax(s, dim=-1), v)


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
    s = (torch.matmul(q, k.transpose(-1, -2)) * 0.5).masked_fill(hidden, torch.finfo(q.dtype).min)
    return torch.matmul(F.softmax(s, dim=-1), v)


def kept(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
    s = torch.where(~hidden, torch.matmul(q, k.transpose(-1, -2)) * 0.5, -math.inf)
    return torch.matmul(F.softmax(s, dim=-1), v)


def softmaxed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
    weights = F.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.5 + mask, dim=-1)
    return torch.matmul(F.dropout(weights, 0.0), v)


def widened(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, hidden: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2)).float() * 0.5 + mask
    return torch.matmul(F.softmax(s, dim=-1).to(q.dtype), v)


def operands(dtype: torch.dtype, fill: float, scale: float = 3.0) -> list[Tensor]:
    """Two left-padded rows under a causal mask; scores are large enough to move a softmax far from uniform."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 6, 8).mul(scale).to(dtype).requires_grad_() for _ in range(3))
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1).expand(2, 1, 6, 6).clone()
    hidden[1, :, :, :3] = True
    return [q, k, v, torch.zeros(2, 1, 6, 6, dtype=dtype).masked_fill(hidden, fill), hidden]


def values_and_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    out = function(*inputs)
    torch.manual_seed(2)
    wanted = [t for t in inputs if t.requires_grad]
    return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), wanted)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("form", [added, filled, kept, softmaxed, widened])
@pytest.mark.parametrize("rules", ["default", "attention"])
def test_rows_hidden_whole(form: Callable[..., Tensor], fill: str, dtype: torch.dtype, rules: str) -> None:
    tensors = operands(dtype, FILLS[fill](dtype))
    module, _ = rewritten(form, tensors, rules)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    with fused.backend("reference"):
        ours = values_and_gradients(module, tensors)
    for a, b in zip(ours, values_and_gradients(form, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_the_kernel_runs_where_no_row_is_hidden_whole() -> None:
    q, k, v, mask, _ = operands(torch.float32, torch.finfo(torch.float32).min)
    assert attention(q[:1], k[:1], v[:1], attn_mask=mask[:1]).grad_fn.name() == "_AttentionBackward"
    assert attention(q, k, v, attn_mask=mask).grad_fn.name() != "_AttentionBackward"


@pytest.mark.parametrize("rules", ["default", "attention", "all"])
def test_a_loss_on_the_token_after_left_padding(rules: str) -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=61,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = hf.LlamaForCausalLM(config)
    twin = copy.deepcopy(model)
    ids, mask = torch.randint(0, 61, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    schedule.optimize(model, batch, rules=rules, cost_guard=False)
    for each in (model, twin):
        each(**batch).loss.backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)
