"""Rotary position embedding."""

from __future__ import annotations

import torch

import fused
from tests.fused.cases import Case, nbytes, normal

Tensor = torch.Tensor


def rotated_pairs(x: Tensor, interleaved: bool) -> Tensor:
    """``rotate_half`` of modeling code: of Llama, or of Cohere where pairs are interleaved."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def eager_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb`` of GPT-NeoX, which has Llama's and the partial one."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def one(x: Tensor) -> Tensor:
        turned, passed = x[..., :width], x[..., width:]
        return torch.cat([turned * cos + rotated_pairs(turned, interleaved) * sin, passed], dim=-1)

    return one(q), one(k)


def inputs(rows: int, columns: int, passed: int = 0) -> tuple[Tensor, ...]:
    """q with four heads, k with two, and angles of a position as they are in models."""
    angles = torch.rand(2, rows, columns, dtype=torch.float64) * 6
    angles = torch.cat((angles, angles), -1)
    q, k = (normal(2, heads, rows, 2 * columns + passed) for heads in (4, 2))
    return q, k, angles.cos(), angles.sin()


def _case(name: str, interleaved: bool, passed: int = 0, frozen: tuple[int, ...] = (2, 3)) -> Case:
    return Case(
        name,
        op=lambda q, k, cos, sin: fused.rotary_embedding(q, k, cos, sin, interleaved=interleaved),
        eager=lambda q, k, cos, sin: eager_rotary(q, k, cos, sin, interleaved),
        inputs=lambda rows, columns: inputs(rows, columns, passed),
        saved=lambda q, k, cos, sin: nbytes(cos, sin),
        frozen=frozen,
        long=interleaved or passed > 0,
    )


CASES = [
    _case("rotary_embedding", False),
    _case("rotary_embedding interleaved", True),
    _case("rotary_embedding partial", False, 3),
    _case("rotary_embedding interleaved partial", True, 3),
    Case(
        "apply_rotary",
        op=lambda q, k, cos, sin: fused.apply_rotary(q, cos.unsqueeze(1), sin.unsqueeze(1)),
        eager=lambda q, k, cos, sin: eager_rotary(q, k, cos, sin)[0],
        inputs=inputs,
        saved=lambda q, k, cos, sin: nbytes(cos, sin),
        frozen=(1, 2, 3),
    ),
]
