"""Group norms with an activation, and with a scale and shift of each sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, nbytes, normal

Tensor = torch.Tensor
GROUPS, CHANNELS = 2, 6


def eager_group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """As the blocks of a UNet write it."""
    z = F.group_norm(x, GROUPS, weight, bias, 1e-5)
    if scale is not None:
        z = z * (1 + scale)
    return z if shift is None else z + shift


def inputs(rows: int, columns: int) -> tuple[Tensor, ...]:
    return normal(rows, CHANNELS, columns), normal(CHANNELS), normal(CHANNELS)


def _saved(*tensors: Tensor) -> int:
    x = tensors[0]
    return nbytes(*tensors) + 2 * GROUPS * x.shape[0] * torch.promote_types(x.dtype, torch.float32).itemsize


CASES = [
    Case(
        "group_norm silu, scale, shift",
        op=lambda x, weight, bias, scale, shift: fused.group_norm(
            x, GROUPS, weight, bias, activation="silu", scale=scale, shift=shift
        ),
        eager=lambda x, weight, bias, scale, shift: F.silu(eager_group_norm(x, weight, bias, scale, shift)),
        inputs=lambda rows, columns: (
            *inputs(rows, columns),
            normal(rows, CHANNELS, 1, spread=0.5),
            normal(1, CHANNELS, 1),
        ),
        saved=_saved,
        sums=(0, 1, 2, 3, 4),
        triton=False,
    ),
    Case(
        "group_norm silu",
        op=lambda x, weight, bias: fused.group_norm(x, GROUPS, weight, bias, activation="silu"),
        eager=lambda x, weight, bias: F.silu(eager_group_norm(x, weight, bias)),
        inputs=inputs,
        saved=_saved,
        sums=(0, 1, 2),
        triton=False,
        long=True,
    ),
    Case(
        "group_norm gelu without weight",
        op=lambda x: fused.group_norm(x, GROUPS, activation="gelu"),
        eager=lambda x: F.gelu(eager_group_norm(x, None, None)),
        inputs=lambda rows, columns: inputs(rows, columns)[:1],
        saved=_saved,
        sums=(0,),
        triton=False,
        long=True,
    ),
    Case(
        "group_norm relu, shift",
        op=lambda x, weight, shift: fused.group_norm(x, GROUPS, weight, activation="relu", shift=shift),
        eager=lambda x, weight, shift: F.relu(eager_group_norm(x, weight, None, shift=shift)),
        inputs=lambda rows, columns: (*inputs(rows, columns)[:2], normal(rows, CHANNELS, 1)),
        saved=_saved,
        sums=(0, 1, 2),
        triton=False,
        long=True,
    ),
]
