"""Cross entropy, as HuggingFace writes it: in float32 for 16-bit logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fused
from tests.fused.cases import Case, Tensor, nbytes, normal


def upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def capped(x: Tensor) -> Tensor:
    return 5.0 * torch.tanh(upcast(x) / 5.0)


def flat_loss(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """F.cross_entropy of ``[..., vocab]``, whose rows it wants flat."""
    losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **options)
    return losses.reshape(targets.shape) if options.get("reduction") == "none" else losses


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    squares = torch.logsumexp(logits, -1).square()
    return F.cross_entropy(logits, targets) + 1e-2 * squares[targets != -100].sum() / (targets != -100).sum()


def some_targets(*shape: int, classes: int) -> Tensor:
    """Random classes; the second row of several is ignored."""
    targets = torch.randint(classes, shape)
    if shape[0] > 1:
        targets[1] = -100
    return targets


def _rows(rows: int, columns: int) -> tuple[Tensor, ...]:
    return normal(rows, columns), some_targets(rows, classes=columns)


def _saved(logits: Tensor, targets: Tensor) -> int:
    """Logits, targets, and of each row two numbers and whether it is ignored; for a mean, how many are not."""
    return nbytes(logits, targets) + 9 * targets.numel() + 8


def _case(name: str, eager: Callable[..., Tensor], **options: Any) -> Case:
    return Case(
        f"cross_entropy {name}",
        op=lambda logits, targets: fused.cross_entropy(logits, targets, **options),
        eager=eager,
        inputs=_rows,
        # The square of the z-loss saves the whole logsumexp.
        saved=lambda logits, targets: _saved(logits, targets) + 4 * targets.numel() * ("z_loss" in options),
    )


def _weighted(name: str, eager: Callable[..., Tensor], long: bool = False, **options: Any) -> Case:
    """Return a case with a weight for each class, in the dtype of the loss."""
    return Case(
        f"cross_entropy {name}",
        op=lambda logits, targets, weight: fused.cross_entropy(logits, targets, class_weight=weight, **options),
        eager=lambda logits, targets, weight: eager(upcast(logits), targets, upcast(weight)),
        inputs=lambda rows, columns: (*_rows(rows, columns), normal(columns).abs()),
        saved=lambda logits, targets, weight: _saved(logits, targets) + 8 * weight.numel(),
        frozen=(2,),
        triton=False,
        long=long,
    )


CASES = [
    _case("mean", lambda x, t: F.cross_entropy(upcast(x), t)),
    _case("sum", lambda x, t: F.cross_entropy(upcast(x), t, reduction="sum"), reduction="sum"),
    _case("smoothed", lambda x, t: F.cross_entropy(upcast(x), t, label_smoothing=0.1), label_smoothing=0.1),
    _case("z-loss", lambda x, t: z_loss(upcast(x), t), z_loss=1e-2),
    _case("soft cap", lambda x, t: F.cross_entropy(capped(x), t, reduction="none"), softcap=5.0, reduction="none"),
    _weighted("weighted", lambda x, t, w: F.cross_entropy(x, t, w), long=True),
    _weighted(
        "weighted, smoothed, sum",
        lambda x, t, w: F.cross_entropy(x, t, w, label_smoothing=0.1, reduction="sum"),
        long=True,
        label_smoothing=0.1,
        reduction="sum",
    ),
    Case(
        "cross_entropy with metrics",
        op=lambda logits, targets: fused.cross_entropy_with_metrics(logits, targets).loss,
        eager=lambda logits, targets: F.cross_entropy(upcast(logits), targets),
        inputs=_rows,
        saved=_saved,
        long=True,
    ),
    Case(
        "cross_entropy of three dimensions",
        op=lambda logits, targets: fused.cross_entropy(logits, targets, reduction="none"),
        eager=lambda logits, targets: flat_loss(upcast(logits), targets, reduction="none"),
        inputs=lambda rows, columns: (normal(2, rows, columns), some_targets(2, rows, classes=columns)),
        saved=_saved,
    ),
]


def _linear(name: str, eager: Callable[..., Tensor], with_bias: bool = True, **options: Any) -> Case:
    def op(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
        return fused.linear_cross_entropy(hidden, weight, targets, bias, chunk_rows=64, **options)

    def inputs(rows: int, columns: int) -> tuple[Tensor, ...]:
        operands = normal(rows, columns, spread=0.3), normal(9, columns, spread=0.3), some_targets(rows, classes=9)
        return (*operands, normal(9, spread=0.3)) if with_bias else operands

    return Case(
        f"linear_cross_entropy {name}",
        op=op,
        eager=lambda hidden, weight, targets, bias=None: eager(upcast(F.linear(hidden, weight, bias)), targets),
        inputs=inputs,
        saved=nbytes,
        sums=(0, 1, 3) if with_bias else (0, 1),
        special=False,  # which of 0·inf a matrix product comes upon is its own affair
    )


def _linear_weighted(name: str, **options: Any) -> Case:
    """Return a case with a weight for each class and all other options."""
    squares = options.get("z_loss", 0.0)

    def eager(hidden: Tensor, weight: Tensor, targets: Tensor, of_classes: Tensor) -> Tensor:
        logits = upcast(F.linear(hidden, weight))
        loss = F.cross_entropy(logits, targets, upcast(of_classes), label_smoothing=options.get("label_smoothing", 0.0))
        counted = targets != -100
        total = torch.where(counted, upcast(of_classes)[targets.clamp(0)], 0).sum()
        return loss + squares * torch.where(counted, torch.logsumexp(logits, -1).square(), 0).sum() / total

    def op(hidden: Tensor, weight: Tensor, targets: Tensor, of_classes: Tensor) -> Tensor:
        return fused.linear_cross_entropy(hidden, weight, targets, class_weight=of_classes, chunk_rows=64, **options)

    def inputs(rows: int, columns: int) -> tuple[Tensor, ...]:
        operands = normal(rows, columns, spread=0.3), normal(9, columns, spread=0.3), some_targets(rows, classes=9)
        return *operands, normal(9).abs()

    return Case(
        f"linear_cross_entropy {name}",
        op=op,
        eager=eager,
        inputs=inputs,
        saved=nbytes,
        frozen=(3,),
        sums=(0, 1),
        special=False,
        triton=False,
        long=bool(options),
    )


CASES += [
    _linear_weighted("weighted"),
    _linear_weighted("weighted, smoothed, z-loss", label_smoothing=0.1, z_loss=1e-2),
    _linear("mean", F.cross_entropy),
    _linear("sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), with_bias=False, reduction="sum"),
    _linear("none", lambda x, t: F.cross_entropy(x, t, reduction="none"), reduction="none"),
    _linear(
        "with all options",
        lambda x, t: (
            F.cross_entropy(capped(x), t, label_smoothing=0.1, reduction="none")
            + torch.where(t == -100, 0, 1e-2 * torch.logsumexp(capped(x), -1).square())
        ),
        softcap=5.0,
        label_smoothing=0.1,
        z_loss=1e-2,
        reduction="none",
    ),
]
