"""Losses of distillation: divergences of a student's distribution over the vocabulary from a teacher's.

On hidden states, neither model's full logits are ever in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from fused.backends import Op, requested
from fused.backends.reference import distillation as formulas
from fused.backends.tracing import differentiated, transformed
from fused.checks import MismatchError, check_float, check_same_device, shape
from fused.chunked_loss import OfChunk
from fused.linear import linear
from fused.linear_loss import Others, as_autocast, check_chunk_rows, check_operands, linear_loss
from fused.loss import check_reduction, reduced
from fused.sharding import sharded

Tensor = torch.Tensor
Kind = Literal["jsd", "tvd"]

DISTILLATION = Op("distillation", forward=formulas.divergence, backward=formulas.divergence_backward)


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    kind: Kind = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """Compute the divergence of ``q = softmax(student / temperature)`` from ``p = softmax(teacher / temperature)``.

    "jsd" is the generalized Jensen-Shannon divergence ``β·KL(p‖m) + (1 − β)·KL(q‖m)`` with ``m = β·p + (1 − β)·q``; of
    β = 0 it is the forward ``KL(p‖q)``, of β = 1 the reverse ``KL(q‖p)``. "tvd" is the total variation distance
    ``½·Σ|p − q|``. There is no factor of temperature²: multiply by it to keep the size of gradients.

    Args:
        student, teacher: ``[..., vocab]`` logits; float16, bfloat16, float32 or float64. No gradient for the teacher.
        mask: ``[...]``, boolean, True for the rows that count; None for all.
        kind: ``"jsd"`` or ``"tvd"``.
        beta: from 0 to 1.
        temperature: above 0.
        reduction: ``"mean"`` over the rows that count, ``"sum"`` or ``"none"``; rows that do not count are 0.

    Returns:
        A number, or ``[...]`` for reduction "none"; float32 for 16-bit logits. Saves the logits of both.

    Raises:
        TypeError: if logits are not floating point, or the mask not boolean.
        ValueError: for shapes that do not fit, tensors on two devices, or settings out of range.

    Source: Hinton, Vinyals and Dean 2015; Agarwal et al. 2024 (GKD) for the generalized divergence; Wen et al. 2023 for
    the total variation distance.
    """
    op = "distillation_loss"
    settings = _Settings(op, kind, beta, temperature, reduction).checked()
    check_float(op, "student", student, min_ndim=1)
    check_float(op, "teacher", teacher, min_ndim=1)
    check_same_device(op, student, "teacher", teacher)
    if student.shape != teacher.shape or not student.shape[-1]:
        raise MismatchError(f"{op}: the logits need one shape [..., vocab], got {shape(student)} and {shape(teacher)}")
    _check_mask(op, mask, student)
    teacher = teacher.detach()
    if transformed(student, teacher) or sharded(student, teacher):
        losses = formulas.divergence(student, teacher, **settings.of_rows)
    elif differentiated(student) and student.numel():
        losses = _Divergence.apply(student, teacher, settings)
    else:
        losses = _losses(student, teacher, **settings.of_rows)
    return settings.reduce(losses, mask)


def linear_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    kind: Kind = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """Compute `distillation_loss` of ``F.linear`` of hidden states in chunks of rows, without full logits.

    Args:
        hidden, weight, bias: the student's, as in `linear_cross_entropy`: ``[..., features]``, ``[vocab, features]``
            and ``[vocab]``.
        teacher_hidden, teacher_weight, teacher_bias: the teacher's, with features of its own; no gradients.
        mask, kind, beta, temperature, reduction: as in `distillation_loss`.
        chunk_rows: as in `linear_cross_entropy`; two chunks of logits are in memory.

    Returns:
        A number, or ``[...]`` for reduction "none"; float32 for 16-bit inputs. Gradients are computed together with the
        loss, or in the backward pass, as by `linear_cross_entropy`. Double backward, `torch.func`, `torch.compile` and
        DTensors run the plain expression with full logits.

    Raises:
        TypeError: if the operands are not floating point, or of different dtypes within a model.
        ValueError: for shapes that do not fit, tensors on two devices, or settings out of range.

    Source: as `distillation_loss`; Liger-Kernel ``LigerFusedLinearJSD``.
    """
    op = "linear_distillation_loss"
    settings = _Settings(op, kind, beta, temperature, reduction).checked()
    check_operands(op, hidden, weight, bias)
    check_operands(op, teacher_hidden, teacher_weight, teacher_bias, "teacher_")
    check_same_device(op, hidden, "teacher_hidden", teacher_hidden)
    if hidden.shape[:-1] != teacher_hidden.shape[:-1] or weight.shape[0] != teacher_weight.shape[0]:
        raise MismatchError(
            f"{op}: student and teacher need the same rows and vocabulary, got {shape(hidden)} with {shape(weight)} "
            f"and {shape(teacher_hidden)} with {shape(teacher_weight)}"
        )
    check_chunk_rows(op, chunk_rows)
    _check_mask(op, mask, hidden)
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    teacher = [None if each is None else each.detach() for each in (teacher_hidden, teacher_weight, teacher_bias)]
    others = (*as_autocast(*teacher), mask)  # type: ignore[arg-type]
    if transformed(hidden, weight, bias, *teacher) or sharded(hidden, weight, *teacher):
        return settings.expression(hidden, weight, bias, others)[0]
    return linear_loss(settings, hidden, weight, bias, others, chunk_rows)[0]


@dataclass(frozen=True)
class _Settings:
    """Settings of a divergence; as a loss of a linear layer, the others are the teacher's operands and the mask."""

    op: str
    kind: str
    beta: float
    temperature: float
    reduction: str

    def checked(self) -> _Settings:
        """Return these settings, or raise ValueError if one is out of range."""
        if self.kind not in ("jsd", "tvd"):
            raise ValueError(f"{self.op}: kind must be 'jsd' or 'tvd', got {self.kind!r}")
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"{self.op}: beta must be from 0 to 1, got {self.beta}")
        if not self.temperature > 0.0:
            raise ValueError(f"{self.op}: temperature must be above 0, got {self.temperature}")
        check_reduction(self.op, self.reduction)
        return self

    @property
    def of_rows(self) -> dict[str, Any]:
        """The settings of the formulas."""
        return {"kind": self.kind, "beta": float(self.beta), "temperature": float(self.temperature)}

    def reduce(self, losses: Tensor, mask: Tensor | None) -> Tensor:
        """Reduce the losses of all rows, those that do not count being 0."""
        losses = losses if mask is None else torch.where(mask, losses, 0.0)
        return reduced(losses, self.reduction, self._rows(losses, mask))

    def _rows(self, like: Tensor, mask: Tensor | None) -> Tensor | None:
        if self.reduction != "mean":
            return None
        return mask.sum() if mask is not None else like.new_full((), like.numel())

    def count(self, others: Others) -> Tensor | None:
        teacher, *_, mask = others
        return None if teacher is None else self._rows(teacher[..., 0], mask)

    def of_chunks(self, classes: int, others: Others, backend: str | None) -> OfChunk:
        hidden, weight, bias, mask = others
        if hidden is None or weight is None:
            raise ValueError(f"{self.op}: there is no teacher")
        rows, counted = hidden.reshape(-1, hidden.shape[-1]), None if mask is None else mask.reshape(-1)

        def of_chunk(chunk: slice, logits: Tensor, g: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
            teacher = linear(rows[chunk], weight, bias)
            losses = DISTILLATION.run("forward", (logits, teacher), backend, **self.of_rows)
            gradient = None
            if g is not None:
                gradient = DISTILLATION.run("backward", (logits, teacher, g), backend, **self.of_rows)
            if counted is not None:
                losses = torch.where(counted[chunk], losses, 0.0)
                gradient = None if gradient is None else torch.where(counted[chunk].unsqueeze(-1), gradient, 0.0)
            return (losses,), gradient

        return of_chunk

    def expression(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, others: Others) -> tuple[Tensor, ...]:
        teacher_hidden, teacher_weight, teacher_bias, mask = others
        if teacher_hidden is None or teacher_weight is None:
            raise ValueError(f"{self.op}: there is no teacher")
        logits, teacher = linear(hidden, weight, bias), linear(teacher_hidden, teacher_weight, teacher_bias)
        return (self.reduce(formulas.divergence(logits, teacher, **self.of_rows), mask),)


def _losses(student: Tensor, teacher: Tensor, **of_rows: Any) -> Tensor:
    """Compute the losses of the rows on the chosen backend."""
    flat = (student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1]))
    losses: Tensor = DISTILLATION.run("forward", flat, requested(), **of_rows)
    return losses.reshape(student.shape[:-1])


class _Divergence(torch.autograd.Function):
    """Autograd function of the losses of the rows, saving the logits of both."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, settings: _Settings) -> Tensor:
        ctx.save_for_backward(student, teacher)
        ctx.settings, ctx.backend = settings, requested()
        return _losses(student, teacher, **settings.of_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (student, teacher) = grads, ctx.saved_tensors
        classes = student.shape[-1]
        flat = (student.reshape(-1, classes), teacher.reshape(-1, classes), g.reshape(-1))
        gradient = DISTILLATION.run("backward", flat, ctx.backend, **ctx.settings.of_rows)
        return gradient.reshape(student.shape), None, None


def _check_mask(op: str, mask: Tensor | None, like: Tensor) -> None:
    if mask is None:
        return
    if mask.dtype is not torch.bool:
        raise TypeError(f"{op}: mask must be boolean, got {mask.dtype}")
    if mask.shape != like.shape[:-1]:
        raise MismatchError(f"{op}: mask must be one for each row of {shape(like)}, got {shape(mask)}")
    check_same_device(op, like, "mask", mask)
