"""Passes over the logits for cross entropy: an online logsumexp forward, one block of a row per program backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused.backends.reference.losses import RowSettings
from fused.backends.triton.arithmetic import LN2, LOG2E, coarse_tanh, exp, tanh
from fused.backends.triton.launch import BLOCK, as_rows, cdiv, empty_like, launch, row_tile

Tensor = torch.Tensor


# Elements of a row that a thread reads at a time, and the bytes of its widest load.
_PER_THREAD = 16
_LOAD = 16


@triton.jit
def _add_block(
    z, inside, highest, sums, plain, count, factor, unit, CAPPED: tl.constexpr, TOTAL: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add a block to each lane's maximum, and to its sum of exponentials and plain sum relative to the maximum."""
    if CAPPED and (MASKED or TOTAL):
        z = tanh(z * factor)
    elif CAPPED:
        # The errors of this many columns cancel in the sum.
        z = coarse_tanh(z * factor)
    if MASKED:
        z = tl.where(inside, z, float("-inf"))
    # The maximum of the elements of a thread first: one exponential for each, and no exchange between threads.
    higher = tl.maximum(highest, tl.max(tl.max(z, 2), 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    below = z - base[None, :, None]
    if TOTAL:
        plain += (tl.where(highest == float("-inf"), 0.0, highest) - base) * count
        plain += tl.sum(tl.sum(tl.where(inside, below, 0.0) if MASKED else below, 2), 0)
        count += tl.sum(tl.sum(tl.where(inside, 1.0, 0.0) if MASKED else tl.full(z.shape, 1.0, tl.float32), 2), 0)
    # A capped logit is small, so one rounding of its scaled maximum costs no digits; others are subtracted first.
    e = tl.exp2(z * unit - (base * unit)[None, :, None]) if CAPPED else tl.exp2(below * unit)
    return higher, sums * tl.exp2((highest - base) * unit) + tl.sum(tl.sum(e, 2), 0), plain, count


@triton.jit
def _add_columns(z, columns, best, first):
    """Add the columns of a block to each lane's highest logit and the first column with it."""
    # A NaN is the highest, as in `argmax`.
    z = tl.where(z == z, z, float("inf"))
    highest = tl.max(tl.max(z, 2), 0)
    column = tl.min(tl.min(tl.where(z == highest[None, :, None], columns, 2147483647), 2), 0)
    return tl.maximum(best, highest), tl.where(highest > best, column, first)


@triton.jit
def logit_statistics_kernel(
    logits, index, highest_logit, lse, picked, total, predicted, vectors, columns, softcap,
    ignored, of_picked, of_total, z_loss,
    REPEATS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, CAPPED: tl.constexpr, TOTAL: tl.constexpr,
    WHOLE: tl.constexpr, Z_LOSS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of one row, with a separate maximum and sum per lane until the end."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(index + row)
    logits += row * vectors * VECTOR
    here = (target >= 0) & (target < columns)
    chosen = tl.load(logits + target, mask=here, other=0.0).to(tl.float32)
    highest = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    plain = tl.zeros([LANES], tl.float32)
    count = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES], float("-inf"), tl.float32)
    first = tl.zeros([LANES], tl.int32)
    # Each thread has one lane, of REPEATS vectors.
    lane = tl.arange(0, LANES)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    lane += tl.arange(0, REPEATS)[:, None, None] * (LANES * VECTOR)
    BLOCK: tl.constexpr = REPEATS * LANES * VECTOR
    factor = 1 / softcap
    unit = softcap * LOG2E
    full = columns // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        z = tl.load(logits + start + lane).to(tl.float32)
        if predicted is not None:
            best, first = _add_columns(z, start + lane, best, first)
        highest, sums, plain, count = _add_block(
            z, True, highest, sums, plain, count, factor, unit, CAPPED, TOTAL, False
        )
    if full < columns:
        inside = full + lane < columns
        z = tl.load(logits + full + lane, mask=inside, other=float("-inf")).to(tl.float32)
        if predicted is not None:
            best, first = _add_columns(z, full + lane, best, first)
        highest, sums, plain, count = _add_block(
            z, inside, highest, sums, plain, count, factor, unit, CAPPED, TOTAL, True
        )
    if predicted is not None:
        column = tl.min(tl.where(best == tl.max(best, 0), first, 2147483647), 0)
        tl.store(predicted + row, column.to(tl.int64))
    top = tl.max(highest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(highest_logit + row, base * softcap)
    # Read again, so that it takes no register in the loop.
    target = tl.load(index + row, volatile=True)
    here = (target >= 0) & (target < columns)
    exponents = tl.log2(tl.sum(sums * tl.exp2((highest - base) * unit), 0)) * LN2
    tl.store(lse + row, exponents)
    if CAPPED:
        chosen = tanh(chosen * factor)
    chosen = (chosen - base) * softcap
    if TOTAL:
        plain += (tl.where(highest == float("-inf"), 0.0, highest) - base) * count
        plain_total = tl.sum(plain, 0) * softcap
    if WHOLE:
        loss = exponents + of_picked * tl.where(here, chosen, float("nan"))
        if TOTAL:
            loss += of_total * plain_total
        if Z_LOSS:
            level = base * softcap + exponents
            loss += z_loss * level * level
        if SCALED:
            scale = tl.where(target == ignored, 0.0, exp(chosen - exponents))
            loss *= scale
            tl.store(total + row, scale)
        tl.store(picked + row, tl.where(target == ignored, 0.0, loss))
    else:
        tl.store(picked + row, tl.where(here, chosen, 0.0))
        if TOTAL:
            tl.store(total + row, plain_total)


@triton.jit
def logit_gradient_kernel(
    logits, g, counts, index, highest, lse, out, stride, columns, softcap, g_stride, ignored,
    of_picked, of_total, twice_z_loss,
    COLUMNS: tl.constexpr, CAPPED: tl.constexpr, TOTAL: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a part of a row, with `out` possibly the logits."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    target = tl.load(index + row)
    g_row = tl.load(g + row * g_stride).to(tl.float32)
    if counts is not None:
        g_row /= tl.load(counts).to(tl.float32)
    g_row = tl.where(target == ignored, 0.0, g_row)
    top, sums = tl.load(highest + row), tl.load(lse + row)
    g_lse = g_row * (1 + twice_z_loss * (top + sums)) if Z_LOSS else g_row
    z = tl.load(logits + row * stride + column, mask=column < columns, other=0.0).to(tl.float32)
    if CAPPED:
        z = z * (1 / softcap)
        z = coarse_tanh(z) if logits.dtype.element_ty.primitive_bitwidth == 16 else tanh(z)
        slope = 1 - z * z
        z = z * softcap
    dz = exp(z - top) * (exp(-sums) * g_lse) + tl.where(column == target, g_row * of_picked, 0.0)
    if TOTAL:
        dz += g_row * of_total
    if CAPPED:
        dz *= slope
    tl.store(out + row * columns + column, dz, mask=column < columns)


def logit_statistics(
    logits: Tensor,
    index: Tensor,
    softcap: float | None,
    class_weight: Tensor | None = None,
    *,
    settings: RowSettings,
    whole: bool,
    token_scaling: bool = False,
    predicts: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the reference formula of this name, or return NotImplemented for float64 and class weights."""
    if logits.dtype == torch.float64 or class_weight is not None:
        return NotImplemented
    rows = as_rows(logits)
    count, columns = rows.shape
    smoothed = settings.label_smoothing != 0.0
    highest, lse, picked = [empty_like(index, torch.float32) for _ in range(3)]
    scaled = token_scaling and whole
    sums = empty_like(index, torch.float32) if scaled or (smoothed and not whole) else None
    predicted = empty_like(index, torch.int64) if predicts else None
    warps = row_tile(columns, whole=BLOCK, numbers=1).warps
    vector = _LOAD // rows.element_size()
    if rows.stride(0) % vector or rows.data_ptr() % _LOAD:
        vector = 1
    launch(
        logit_statistics_kernel,
        (count, 1, 1),
        (rows, index.contiguous(), highest, lse, picked, sums, predicted),
        (),
        (
            rows.stride(0) // vector,
            columns,
            1.0 if softcap is None else float(softcap),
            *_of_losses(settings),
            settings.z_loss,
        ),
        REPEATS=_PER_THREAD // vector,
        LANES=32 * warps,
        VECTOR=vector,
        CAPPED=softcap is not None,
        TOTAL=smoothed,
        WHOLE=whole,
        Z_LOSS=settings.z_loss != 0.0,
        SCALED=scaled,
        num_warps=warps,
    )
    return highest, lse, picked, sums, predicted


def _of_losses(settings: RowSettings) -> tuple[int, float, float]:
    """Return the ignored index, and the factors of the picked logit and of the sum of the logits in a loss."""
    smoothing = settings.label_smoothing
    return settings.ignored, smoothing - 1.0, -smoothing / settings.classes


def logit_statistics_backward(
    logits: Tensor,
    g: Tensor,
    count: Tensor | None,
    index: Tensor,
    highest: Tensor,
    lse: Tensor,
    softcap: float | None,
    class_weight: Tensor | None = None,
    *,
    settings: RowSettings,
    inplace: bool,
) -> Tensor:
    """Compute the reference formula of this name, or return NotImplemented for float64 and class weights."""
    if logits.dtype == torch.float64 or class_weight is not None:
        return NotImplemented
    rows = as_rows(logits)
    count_of_rows, columns = rows.shape
    out = rows if inplace else empty_like(rows)
    tile = row_tile(columns, whole=BLOCK // 2, numbers=1)
    launch(
        logit_gradient_kernel,
        (count_of_rows, cdiv(columns, tile.columns), 1),
        (rows, g.contiguous(), count, index.contiguous(), highest.contiguous(), lse.contiguous(), out),
        (),
        (
            rows.stride(0),
            columns,
            1.0 if softcap is None else float(softcap),
            0 if g.ndim == 0 else 1,
            *_of_losses(settings),
            2.0 * settings.z_loss,
        ),
        COLUMNS=tile.columns,
        CAPPED=softcap is not None,
        TOTAL=settings.label_smoothing != 0.0,
        Z_LOSS=settings.z_loss != 0.0,
        num_warps=tile.warps,
    )
    return out.reshape(logits.shape)
