"""Rotary position embedding as models write it, and expressions like it, for the proofs of its rules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from schedule.rules.rule import Form


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, and cos and sin of the whole head and of half of it.

    ``shape`` is (batch, heads, seq, head_dim).
    """
    batch, heads, seq, width = shape
    q, k = torch.randn(batch, heads, seq, width, dtype=dtype), torch.randn(batch, 1, seq, width, dtype=dtype)
    angles = (torch.randn(1, seq, size, dtype=dtype) for size in (width, width, width // 2, width // 2))
    return q, k, *angles


SHAPES = ((2, 3, 5, 8), (1, 2, 7, 8), (2, 1, 1, 8))


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_half_fixed(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[:, :, :, 1::2], x[:, :, :, 0::2]), dim=-1).flatten(-2)


def rotate_viewed_pairs(x: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-b, a], dim=-1).flatten(3)


def rotate_unflattened_pairs(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-b, a], dim=-1).reshape(x.shape)


def rotate_viewed_halves(x: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.cat([-b, a], dim=-1)


def of_diffusers(rotate: Callable[[Tensor], Tensor]) -> Form:
    """Return the form of Flux and other models of diffusers, with heads after the tokens."""

    def form(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (angle[:, :, None, :].to(q.device) for angle in (cos, sin))
        x = q.transpose(1, 2)
        return (wide(x) * cos + wide(rotate(x)) * sin).to(x.dtype)

    return form


def wide(x: Tensor) -> Tensor:
    """Return ``x.float()``, but keep float64.

    Rules leave float64 inputs alone if a model casts them to float32.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def of_transformers(rotate: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> tuple[Form, ...]:
    """Return the forms of LLaMA, Cohere, ModernBERT, ERNIE, OLMo, GPT-NeoX and GPT-J.

    ``other`` is another way to write ``rotate``.
    """

    def llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    def one(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return q * cos.unsqueeze(1) + other(q) * sin.unsqueeze(1)

    def cohere(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q32, k32, cos, sin = wide(q), wide(k), cos.unsqueeze(1), sin.unsqueeze(1)
        q32, k32 = q32 * cos + rotate(q32) * sin, k32 * cos + rotate(k32) * sin
        return q32.to(dtype=q.dtype), k32.to(dtype=k.dtype)

    def modernbert(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = [wide(x) * cos + rotate(wide(x)) * sin for x in (q, k)]
        return turned[0].to(q.dtype), turned[1].to(k.dtype)

    def ernie(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        cos, sin = wide(cos.unsqueeze(1)), wide(sin.unsqueeze(1))
        turned = [wide(x) * cos + wide(other(x)) * sin for x in (q, k)]
        return turned[0].to(q.dtype), turned[1]

    def gpt_neox(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, part_cos: Tensor, part_sin: Tensor
    ) -> tuple[Tensor, ...]:
        cos, sin, width = part_cos.unsqueeze(1), part_sin.unsqueeze(1), part_cos.shape[-1]
        q_rot, q_pass, k_rot, k_pass = q[..., :width], q[..., width:], k[..., :width], k[..., width:]
        q_rot, k_rot = q_rot * cos + rotate(q_rot) * sin, k_rot * cos + rotate(k_rot) * sin
        return torch.cat([q_rot, q_pass], dim=-1), torch.cat([k_rot, k_pass], dim=-1)

    def gptj(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, part_cos: Tensor, part_sin: Tensor) -> Tensor:
        q_rot, q_pass = q[:, :, :, :4], q[:, :, :, 4:]
        return torch.cat([q_rot * part_cos.unsqueeze(1) + other(q_rot) * part_sin.unsqueeze(1), q_pass], dim=-1)

    return llama, one, cohere, modernbert, ernie, gpt_neox, gptj


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat((q[..., q.shape[-1] // 2 :], -q[..., : q.shape[-1] // 2]), dim=-1)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def of_another(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos.unsqueeze(1) + rotate_half(q + k) * sin.unsqueeze(1)


def no_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return q * cos.unsqueeze(1) + torch.cat((-q[..., 2:], q[..., :2]), dim=-1) * sin.unsqueeze(1)


def odd_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-q[..., ::2], q[..., 1::2]), dim=-1).flatten(-2)
    return q * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def pairs_for_halves(x: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.cat([-b, a], dim=-1)


def halves_for_pairs(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack([-b, a], dim=-1).flatten(3)


def viewed_otherwise(x: Tensor) -> Tensor:
    a, b = x.reshape(*x.shape[:-2], -1, x.shape[-2], 2).unbind(-1)
    return torch.stack([-b, a], dim=-1).reshape(x.shape)
