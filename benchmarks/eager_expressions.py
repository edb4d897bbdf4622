"""The expressions of HuggingFace models that the fused ops of `benchmarks/op_table.py` replace."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias), total


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(scores * 0.125 + mask, dim=-1, dtype=torch.float32).to(scores.dtype)


def filled_softmax(scores: Tensor, hidden: Tensor) -> Tensor:
    return F.softmax((scores * 0.125).masked_fill(hidden, -torch.inf), dim=-1)


def causal_softmax(scores: Tensor) -> Tensor:
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
    scores = (scores * 0.125).masked_fill(hidden, torch.finfo(scores.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def capped_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(logits.float() / 30.0) * 30.0, labels)


def jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the divergence of two distributions from their average, as TRL's GKD trainer does."""
    q, p = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    middle = torch.logsumexp(torch.stack((q, p)) - math.log(2.0), 0)
    divergences = (F.kl_div(middle, each, reduction="none", log_target=True) for each in (p, q))
    return sum(divergences, torch.zeros(())).sum() / (2 * student.shape[0])
