"""Cross entropy of a linear layer in chunks of rows, without the full logits in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from fused.backends.tracing import is_compiled_alone, transformed
from fused.chunked_loss import OfChunk
from fused.cross_entropy import check_class_weight, check_range, check_targets, results_of
from fused.linear import linear
from fused.linear_cross_entropy_operator import losses_and_gradients
from fused.linear_loss import Others, as_autocast, check_chunk_rows, check_operands, linear_loss
from fused.loss import CrossEntropyOutput, Loss
from fused.loss_autograd import cross_entropy_of_chunks, plain_loss
from fused.sharding import localise, sharded

Tensor = torch.Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    token_scaling: bool = False,
    chunk_rows: int | None = None,
) -> Tensor:
    """Compute ``cross_entropy(F.linear(hidden, weight, bias), targets)`` in chunks of rows, without full logits.

    For "mean" and "sum" the gradients are computed together with the loss, while the logits of a chunk are in memory,
    and only scaled, in float32, in the backward pass: three matrix products, as many as with full logits. The gradients
    stay in memory from then on, the weight's in float32, as much as the backward pass would take in any case. For
    reduction "none", and where torch has no product of 16-bit matrices with a float32 result (the CPU), the backward
    pass recomputes the logits, a fourth product: a gradient scaled after rounding would be rounded twice. A mean in
    bfloat16 outside of `torch.compile` still has three, if the gradient of the loss is a power of two: its gradients
    are computed for 1, and scaled exactly. With any other gradient of the loss it takes six.

    Args:
        hidden: ``[..., features]``; float16, bfloat16, float32 or float64. A DTensor may be sharded on any dimension
            but the last.
        weight: ``[vocab, features]`` in the dtype of `hidden`. With a DTensor sharded on the vocabulary the logits are
            computed for all rows at once, sharded on the vocabulary as well, for `cross_entropy`.
        targets: ``[...]``, integers from 0 to vocab − 1, or `ignore_index`.
        bias: ``[vocab]`` in the dtype of `hidden`, or None.
        ignore_index, label_smoothing, z_loss, softcap, reduction, class_weight, token_scaling: as in `cross_entropy`.
        chunk_rows: rows per chunk, by default as many as features, and at least 256: the logits of a chunk then take
            the weight's memory. The gradient of the weight is read and written once for each chunk.

    Returns:
        A number, or ``[...]`` for reduction "none"; float32 for 16-bit inputs. Saves its inputs. Double backward,
        `torch.func` and `torch.export` run the plain expression with full logits; `torch.compile` calls an operator
        that works in chunks, and has no second derivative.

    Raises:
        TypeError: if the operands are not floating point or of different dtypes, or the targets not integers.
        ValueError: for shapes that do not fit, tensors on two devices, or settings out of range.
        IndexError: as `cross_entropy`.

    Source: Liger-Kernel ``LigerFusedLinearCrossEntropyFunction``. In chunks, ``F.linear_cross_entropy`` of torch 2.13
    has no z-loss, soft cap or second derivative, smooths labels on full logits only, and took 17 times as long in
    float32 on a CPU (512 rows, 256 features, 16384 classes).
    """
    op = "linear_cross_entropy"
    loss = Loss(op, ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling).checked()
    return _results(loss, hidden, weight, targets, bias, class_weight, chunk_rows)[0]


def linear_cross_entropy_with_metrics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    token_scaling: bool = False,
    chunk_rows: int | None = None,
) -> CrossEntropyOutput:
    """Compute `linear_cross_entropy` with its z-loss, the predicted tokens and their accuracy, in the same chunks.

    Args:
        hidden, weight, targets: ``[..., features]``, ``[vocab, features]`` and ``[...]``, as all other arguments, of
            `linear_cross_entropy`.

    Returns:
        `CrossEntropyOutput`: the loss, and metrics without gradients.

    Raises:
        TypeError, ValueError, IndexError: as `linear_cross_entropy`.

    Source: Liger-Kernel ``LigerFusedLinearCrossEntropyFunction`` (``return_z_loss``, ``return_token_accuracy``,
    ``return_predicted_tokens``).
    """
    op = "linear_cross_entropy_with_metrics"
    loss = Loss(op, ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling, metrics=True).checked()
    results = _results(loss, hidden, weight, targets, bias, class_weight, chunk_rows)
    return loss.output(results, targets, class_weight)


def _results(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    chunk_rows: int | None,
) -> tuple[Tensor, ...]:
    """Check the operands, and compute the reduced loss and the metrics of the rows."""
    op = loss.op
    if bias is not None and bias.shape == (1,):
        bias = bias.expand(weight.shape[0])
    check_operands(op, hidden, weight, bias)
    check_targets(op, "hidden states", hidden, targets)
    check_chunk_rows(op, chunk_rows)
    check_class_weight(op, hidden, class_weight, weight.shape[0])
    operands = (hidden, weight, targets, bias, class_weight)
    return (_sharded if sharded(hidden, weight, bias, targets) else _plain)(loss, *operands, chunk_rows)


def _plain(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    chunk_rows: int | None,
) -> tuple[Tensor, ...]:
    check_range(loss, targets, weight.shape[0])
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    if is_compiled_alone():
        # Written out, since torch.compile of torch 2.11 does not follow dataclasses.astuple.
        settings: tuple[Any, ...] = (loss.ignore_index, loss.label_smoothing, loss.z_loss, loss.softcap)
        settings += (loss.reduction, loss.token_scaling, loss.metrics)
        needs = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in (hidden, weight, bias)]
        operands = (hidden, weight, bias, targets, class_weight)
        result, _, _, _, *metrics = losses_and_gradients(*operands, *settings, chunk_rows, needs)
        return result, *([one.detach() for one in metrics] if loss.metrics else ())
    if transformed(hidden, weight, bias):
        return _OfLogits(loss).expression(hidden, weight, bias, (targets, class_weight))
    return linear_loss(_OfLogits(loss), hidden, weight, bias, (targets, class_weight), chunk_rows)


@dataclasses.dataclass(frozen=True)
class _OfLogits:
    """The cross entropy as a loss of logits; the others are targets and class weights."""

    loss: Loss

    @property
    def reduction(self) -> str:
        return self.loss.reduction

    def of_chunks(self, classes: int, others: Others, backend: str | None) -> OfChunk:
        targets, class_weight = others
        return cross_entropy_of_chunks(self.loss, _given(targets), class_weight, classes, backend)

    def count(self, others: Others) -> Tensor | None:
        targets, class_weight = others
        return self.loss.count(_given(targets), class_weight)

    def expression(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, others: Others) -> tuple[Tensor, ...]:
        targets, class_weight = others
        logits = linear(hidden, weight, bias)
        return plain_loss(self.loss, logits, _given(targets), weight.shape[0], class_weight=class_weight)


def _given(targets: Tensor | None) -> Tensor:
    if targets is None:
        raise ValueError("linear_cross_entropy: there are no targets")
    return targets


def _sharded(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    chunk_rows: int | None,
) -> tuple[Tensor, ...]:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if isinstance(weight, DTensor) and any(one.is_shard(0) for one in weight.placements):
        return results_of(loss, F.linear(hidden, weight, bias), targets, class_weight)
    local = localise(loss.op, hidden, [targets.unsqueeze(-1)], whole=[-1])
    partial = [Partial() if one.is_shard() else Replicate() for one in local.placements]

    def whole(tensor: Tensor) -> Tensor:
        if local.mesh is None:
            return tensor
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, local.mesh, [Replicate()] * local.mesh.ndim, run_check=False)
        everywhere = [Replicate()] * local.mesh.ndim
        result: Tensor = tensor.redistribute(placements=everywhere).to_local(grad_placements=partial)
        return result

    own_bias, own_targets = None if bias is None else whole(bias), local.given(0).squeeze(-1)
    part = dataclasses.replace(loss, reduction="none" if loss.reduction == "none" else "sum")
    result, *metrics = _plain(part, local.x, whole(weight), own_targets, own_bias, class_weight, chunk_rows)
    rows = dataclasses.replace(local, shape=local.shape[:-1])
    metrics = [rows.wrap(one) for one in metrics]
    if loss.reduction == "none":
        return rows.wrap(result), *metrics
    if local.mesh is not None:
        result, own_targets = DTensor.from_local(result, local.mesh, partial, run_check=False), targets
    count = loss.count(own_targets, class_weight)
    return result if count is None else result / count, *metrics
