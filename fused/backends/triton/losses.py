"""Passes over the logits for cross entropy: an online logsumexp forward, one block of a row per program backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused.backends.triton.activations import tanh
from fused.backends.triton.launch import BLOCK, as_rows, launch, row_tile

Tensor = torch.Tensor


@triton.jit
def logit_statistics_kernel(
    logits, index, highest_logit, lse, picked, total, stride, columns, softcap, elsewhere,
    COLUMNS: tl.constexpr, CAPPED: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one row, with a separate maximum and sum per lane until the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    sums = tl.zeros([COLUMNS], tl.float32)
    plain = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        z = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        if CAPPED:
            z = tl.where(column < columns, tanh(z / softcap) * softcap, float("-inf"))
        higher = tl.maximum(highest, z)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        if TOTAL:
            # The numbers summed so far were relative to the maximum of their time.
            plain += (tl.where(highest == float("-inf"), 0.0, highest) - base) * (start // COLUMNS)
            plain += tl.where(column < columns, z - base, 0.0)
        sums = sums * tl.exp(highest - base) + tl.exp(z - base)
        highest = higher
    top = tl.max(highest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(highest_logit + row, base)
    tl.store(lse + row, tl.log(tl.sum(sums * tl.exp(highest - base), 0)))
    if TOTAL:
        count = tl.cdiv(columns - tl.arange(0, COLUMNS), COLUMNS)
        plain += (tl.where(highest == float("-inf"), 0.0, highest) - base) * count
        tl.store(total + row, tl.sum(plain, 0))
    target = tl.load(index + row)
    here = (target >= 0) & (target < columns)
    z = tl.load(logits + target, mask=here, other=0.0).to(tl.float32)
    if CAPPED:
        z = tanh(z / softcap) * softcap
    tl.store(picked + row, tl.where(here, z - base, elsewhere))


@triton.jit
def logit_gradient_kernel(
    logits, g_lse, g_picked, g_total, index, highest, lse, out, stride, columns, softcap,
    COLUMNS: tl.constexpr, CAPPED: tl.constexpr, PICKED: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a part of a row, with `out` possibly the logits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z = tl.load(logits + row * stride + column, mask=column < columns, other=0.0).to(tl.float32)
    if CAPPED:
        z = tanh(z / softcap)
        slope = 1 - z * z
        z = z * softcap
    dz = tl.exp(z - tl.load(highest + row)) * (tl.exp(-tl.load(lse + row)) * tl.load(g_lse + row))
    if PICKED:
        dz += tl.where(column == tl.load(index + row), tl.load(g_picked + row), 0.0)
    if TOTAL:
        dz += tl.load(g_total + row)
    if CAPPED:
        dz *= slope
    tl.store(out + row * columns + column, dz, mask=column < columns)


def logit_statistics(
    logits: Tensor, index: Tensor, softcap: float | None, *, total: bool, elsewhere: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if logits.dtype == torch.float64:
        return NotImplemented
    rows = as_rows(logits)
    count, columns = rows.shape
    statistics = torch.empty(4, count, dtype=torch.float32, device=logits.device)
    tile = row_tile(columns, whole=BLOCK, numbers=1)
    launch(
        logit_statistics_kernel,
        (count,),
        *(rows, index.reshape(-1).contiguous(), *statistics, rows.stride(0), columns, softcap or 1.0, elsewhere),
        COLUMNS=tile.columns,
        CAPPED=softcap is not None,
        TOTAL=total,
        num_warps=tile.warps,
    )
    highest, lse, picked, sums = (one.reshape(index.shape) for one in statistics)
    return highest, lse, picked, sums if total else None


def logit_statistics_backward(
    logits: Tensor,
    g_lse: Tensor,
    g_picked: Tensor | None,
    g_total: Tensor | None,
    index: Tensor,
    highest: Tensor,
    lse: Tensor,
    softcap: float | None,
    *,
    inplace: bool,
) -> Tensor:
    """Compute the reference formula of this name, or return NotImplemented for float64."""
    if logits.dtype == torch.float64:
        return NotImplemented
    rows = as_rows(logits)
    count, columns = rows.shape
    out = rows if inplace else torch.empty_like(rows, memory_format=torch.contiguous_format)
    tile = row_tile(columns, whole=BLOCK // 2, numbers=1)
    # The kernel does not read missing gradients.
    given = [g_lse if one is None else one for one in (g_lse, g_picked, g_total)]
    each = [one.reshape(-1).contiguous() for one in (*given, index, highest, lse)]
    launch(
        logit_gradient_kernel,
        (count, triton.cdiv(columns, tile.columns)),
        *(rows, *each, out, rows.stride(0), columns, softcap or 1.0),
        COLUMNS=tile.columns,
        CAPPED=softcap is not None,
        PICKED=g_picked is not None,
        TOTAL=g_total is not None,
        num_warps=tile.warps,
    )
    return out.reshape(logits.shape)
