"""Star-ReLU with one scale and bias, and with those of each feature."""

from __future__ import annotations

import torch

import fused
from tests.fused.cases import Case, Tensor, nbytes, normal


def eager_star_relu(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """As MetaFormer writes it."""
    return scale * torch.relu(x) ** 2 + bias


def _case(name: str, features: int | None, *, long: bool = False) -> Case:
    def inputs(rows: int, columns: int) -> tuple[Tensor, ...]:
        size = features or columns
        return normal(2, rows, columns, spread=1.0), normal(size, spread=0.5), normal(size)

    return Case(
        f"star_relu{name}",
        op=fused.star_relu,
        eager=eager_star_relu,
        inputs=inputs,
        saved=lambda x, scale, bias: nbytes(x, scale),
        sums=(1, 2),
        triton=False,
        long=long,
    )


CASES = [_case("", 1), _case(" of features", None, long=True)]
