"""Attention as models write it, and expressions like it, for the proofs of its rules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(q: Tensor) -> torch.dtype:
    """Return the dtype of the softmax: float32, or float64 for float64 queries.

    Rules leave float64 scores alone if a model computes their softmax in float32.
    """
    return torch.promote_types(q.dtype, torch.float32)


def llama(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
    p = F.dropout(F.softmax(s, dim=-1, dtype=wide(q)).to(q.dtype), p=0.0, training=True)
    return torch.matmul(p, v).transpose(1, 2).contiguous()


def gpt2(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2)) / 2.0 + mask
    return torch.matmul(F.dropout(F.softmax(s, dim=-1).type(v.dtype), 0.1), v)


def t5(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(q, k.transpose(3, 2)) + bias + mask).softmax(-1), v)


def bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v).view(-1)


def nanogpt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.softmax(((q @ k.transpose(-2, -1)) * 0.5).masked_fill(mask > 1.5, -math.inf), dim=-1) @ v


def gpt_neo(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-1, -2))
    s = torch.where(mask > -1.0, s, torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype))
    return torch.matmul(F.softmax(s + mask, dim=-1), v)


def mpt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    s = (torch.matmul(q, k.transpose(-1, -2)) * 0.5 + bias).masked_fill(mask < -1.0, torch.finfo(q.dtype).min)
    return torch.matmul(F.softmax(s, dim=-1), v)


def repeat(x: Tensor) -> Tensor:
    batch, heads, tokens, features = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, 3, tokens, features)
    return x.reshape(batch, heads * 3, tokens, features)


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return llama(q, repeat(k[:, :1]), repeat(v[:, :1]), mask)


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return bare(q, k[:, 1:2].repeat_interleave(3, dim=1), v[:, :1].repeat_interleave(3, dim=1))


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return queries, keys, values, an additive mask and a bias of each head for (batch, heads, queries, keys)."""
    batch, heads, queries, keys = shape
    q, k, v = (torch.randn(batch, heads, n, 4, dtype=dtype) for n in (queries, keys, keys))
    mask = torch.randn(batch, 1, queries, keys, dtype=dtype)
    mask[..., 0] = torch.finfo(dtype).min
    return q, k, v, mask, torch.randn(1, heads, queries, keys, dtype=dtype)


def weights_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v, weights.sum(-2)


SHAPES = ((2, 3, 4, 5), (1, 3, 4, 4), (3, 3, 1, 6))


def lucidrains(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.5
    p = s.masked_fill(mask < -1.0, -torch.finfo(s.dtype).max).softmax(dim=-1, dtype=wide(q)).type(q.dtype)
    return torch.einsum("b h i j, b h j d -> b h i d", F.dropout(p, 0.1), v)


def heads_after_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    p = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 2.0 + mask).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2)


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
    sinks = bias.amax(-1, keepdim=True).expand(q.shape[0], -1, -1, -1)
    s = torch.cat([s, sinks], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    p = F.dropout(F.softmax(s, dim=-1, dtype=s.dtype)[..., :-1], p=0.0, training=True).to(q.dtype)
    return torch.matmul(p, v).transpose(1, 2).contiguous()


def keys_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhji", q, q).softmax(-1), q) + k.sum() + v.sum()


def heads_summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhjd->bid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


def keys_for_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhji,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, q).softmax(-1), q) + k.sum() + v.sum()
