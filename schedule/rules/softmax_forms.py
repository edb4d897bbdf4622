"""Softmaxes of attention as models write them, for the proof of the rule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from schedule.rules.attention_forms import wide


def _attention(scale: float | None, p: float, narrow: bool = False) -> Callable[..., Tensor]:
    """Build the chain of transformers' eager attention, on products of ``q`` and ``k``."""

    def form(q: Tensor, k: Tensor, *masks: Tensor) -> Tensor:
        s = torch.matmul(q, k.transpose(-1, -2))
        s = s if scale is None else s * scale
        for mask in masks:
            s = s + mask
        weights = F.softmax(s, dim=-1, dtype=wide(q)).to(q.dtype) if narrow else F.softmax(s, dim=-1)
        return F.dropout(weights, p=p, training=True)

    return form


def _first(form: Callable[..., Tensor], count: int) -> Callable[..., Tensor]:
    """Return ``form`` as a function of its first ``count`` tensors."""
    return [
        None,
        None,
        lambda q, k: form(q, k),
        lambda q, k, mask: form(q, k, mask),
        lambda q, k, mask, bias: form(q, k, bias, mask),
    ][count]  # type: ignore[return-value]


def _divided(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return F.dropout(torch.softmax((s + mask).to(wide(q)), -1).type_as(s), 0.1)


def _divided_in_place(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2)).div_(2.0)
    return (s + mask).softmax(-1)


def _alibi(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    q3, k3 = q.flatten(0, -3), k.flatten(0, -3)
    alibi = bias.expand(*q.shape[:-1], k.shape[-2]).reshape(-1, q.shape[-2], k.shape[-2])
    s = alibi.baddbmm(batch1=q3, batch2=k3.transpose(1, 2), beta=1.0, alpha=0.25)
    s = s.view(*q.shape[:-1], k.shape[-2]) + mask
    return F.dropout(F.softmax(s, dim=-1, dtype=wide(q)).to(q.dtype), 0.0, True)


def _causal(q: Tensor, k: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2)) * 0.5
    later = torch.ones(s.shape[-2], s.shape[-1], dtype=torch.bool).triu(1)
    return F.dropout(s.masked_fill(later, float("-inf")).softmax(dim=-1), 0.2)


def _filled(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2))
    s = torch.where(mask > -1.0, s, torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype))
    return F.softmax(s + mask, dim=-1)


def _hidden(mask: Tensor) -> Tensor:
    """Return a bool mask, half of its rows masked altogether."""
    return (mask > 0) | (mask[..., :1] > 0)


def _replaced(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2)) * 0.5
    weights = F.softmax(s.masked_fill(_hidden(mask), torch.finfo(s.dtype).min), dim=-1, dtype=wide(q)).type_as(s)
    return F.dropout(weights, p=0.2, training=True)


def _replaced_in_place(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).div_(2.0).masked_fill_(_hidden(mask), -2.0).softmax(-1)


def _replaced_by_where(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return torch.where(_hidden(mask), -3.0, torch.matmul(q, k.transpose(-1, -2))).softmax(-1)


def _kept_by_where(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2)) / 2.0
    return F.dropout(torch.where(~_hidden(mask), s, -3.0).softmax(-1), 0.2)


def _soft_capped(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    s = torch.tanh(torch.matmul(q, k.transpose(-1, -2)) / 5.0) * 5.0
    return F.softmax(s + mask, dim=-1, dtype=wide(q)).to(q.dtype)


def _gpt_oss(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2)) * 0.5 + mask
    sinks = bias.amax(-1, keepdim=True).expand(*s.shape[:-1], 1)
    s = torch.cat([s, sinks], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return F.dropout(F.softmax(s, dim=-1, dtype=s.dtype)[..., :-1], p=0.1, training=True).to(q.dtype)


def tensors_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, keys, an additive mask and a bias of each head for (batch, heads, queries, keys)."""
    batch, heads, queries, keys = shape
    q, k = torch.randn(batch, heads, queries, 4, dtype=dtype), torch.randn(batch, heads, keys, 4, dtype=dtype)
    mask = torch.randn(batch, 1, queries, keys, dtype=dtype)
    return q, k, mask, torch.randn(1, heads, queries, keys, dtype=dtype)


FORMS: tuple[Callable[..., Tensor], ...] = (
    _first(_attention(0.5, 0.1, narrow=True), 3),
    _first(_attention(0.5, 0.1), 4),
    _first(_attention(None, 0.0), 3),
    _first(_attention(0.5, 0.0), 2),
    _first(_attention(None, 0.3), 2),
    _divided,
    _divided_in_place,
    _alibi,
    _causal,
    _filled,
    _replaced,
    _replaced_in_place,
    _replaced_by_where,
    _kept_by_where,
    _soft_capped,
    _gpt_oss,
)
