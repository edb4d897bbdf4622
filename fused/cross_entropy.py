"""Cross entropy of logits in one pass forward and one backward, with the logits and two numbers per row saved."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from fused.backends.tracing import needs_reference
from fused.checks import MismatchError, check_float, check_same_device, shape
from fused.loss import CrossEntropyOutput, Loss
from fused.loss_autograd import plain_loss
from fused.sharding import Local, localise, sharded

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    token_scaling: bool = False,
    inplace_backward: bool = False,
) -> Tensor:
    """Compute ``F.cross_entropy(logits.float(), targets)`` over the last dimension without a float32 copy of logits.

    With z the (capped) logits of a row, V classes and ε the smoothing, its loss is ``logsumexp(z) − (1 − ε)·z[target]
    − ε·Σz / V + z_loss·logsumexp(z)²``.

    Args:
        logits: ``[..., vocab]``, any rank from 1, any strides; float16, bfloat16, float32 or float64. A DTensor may be
            sharded on any dimension; if sharded on the last one, the loss is vocabulary-parallel.
        targets: ``[...]``, integers from 0 to vocab − 1, or `ignore_index`.
        ignore_index: rows with this target have loss 0 and no gradient, and do not count for the mean.
        label_smoothing: from 0 to 1, as in ``F.cross_entropy``.
        z_loss: factor of the squared logsumexp (PaLM), for rows not ignored.
        softcap: logits become ``softcap·tanh(logits / softcap)`` (Gemma 2), in float32; None for none.
        reduction: ``"mean"`` over rows not ignored, ``"sum"`` or ``"none"``. HuggingFace's `num_items_in_batch` is
            ``reduction="sum"``, divided by it.
        class_weight: ``[vocab]``, floating point, as ``weight`` of ``F.cross_entropy``: the loss of a row is multiplied
            by the weight of its class (not the z-loss), and the mean is weighted. It gets no gradient. Not for logits
            sharded on the vocabulary.
        token_scaling: multiply the loss of a row by the probability of its target, which counts as a constant for the
            gradient.
        inplace_backward: write the gradient over contiguous logits, which saves as much memory as they take and
            leaves them unusable after the backward pass. The op cannot see other readers of the logits, so the
            caller promises that there are none; an op that saved them for its backward pass raises autograd's
            error, as does a second backward pass. A backward pass recorded for double backward does not overwrite.

    Returns:
        A number, or ``[...]`` for reduction "none"; float32 for 16-bit logits. The mean of no rows is NaN. Saves
        logits, targets and two numbers of each row, the highest logit and the logsumexp relative to it;
        with token scaling three. Double backward and `torch.func` work.

    Raises:
        TypeError: if the logits are not floating point or the targets not integers (class probabilities are not
            supported).
        ValueError: for other shapes, tensors on two devices, settings out of range, or `inplace_backward` with logits
            that are a leaf (their values would become their gradient).
        IndexError: for a target out of range, on the CPU; elsewhere, and under tracers, its loss is NaN.

    Source: HuggingFace ``ForCausalLMLoss``; Liger-Kernel ``LigerCrossEntropyFunction``.
    """
    loss = Loss("cross_entropy", ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling).checked()
    return results_of(loss, logits, targets, class_weight, inplace_backward)[0]


def cross_entropy_with_metrics(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    token_scaling: bool = False,
    inplace_backward: bool = False,
) -> CrossEntropyOutput:
    """Compute `cross_entropy` with its z-loss, the predicted tokens and their accuracy, in the same pass.

    Args:
        logits, targets: ``[..., vocab]`` and ``[...]``, as all other arguments, of `cross_entropy`.

    Returns:
        `CrossEntropyOutput`: the loss, and metrics without gradients.

    Raises:
        TypeError, ValueError, IndexError: as `cross_entropy`.

    Source: Liger-Kernel ``LigerCrossEntropyFunction`` (``return_z_loss``, ``return_token_accuracy``,
    ``return_predicted_tokens``).
    """
    op = "cross_entropy_with_metrics"
    loss = Loss(op, ignore_index, label_smoothing, z_loss, softcap, reduction, token_scaling, metrics=True).checked()
    return loss.output(results_of(loss, logits, targets, class_weight, inplace_backward), targets, class_weight)


def results_of(
    loss: Loss, logits: Tensor, targets: Tensor, class_weight: Tensor | None, inplace: bool = False
) -> tuple[Tensor, ...]:
    """Check the operands, and compute the reduced loss and the metrics of the rows."""
    check_operands(loss, logits, targets, inplace)
    check_class_weight(loss.op, logits, class_weight, logits.shape[-1])
    if sharded(logits, targets):
        losses, *metrics = losses_of_shards(loss, logits, targets, inplace, class_weight)
        return loss.reduce(losses, loss.count(targets, class_weight)), *metrics
    classes = logits.shape[-1]
    check_range(loss, targets, classes)
    return plain_loss(loss, logits, targets, classes, class_weight=class_weight, inplace=inplace)


def losses_of_shards(
    loss: Loss, logits: Tensor, targets: Tensor, inplace: bool, class_weight: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Compute the loss and the metrics of each row, ``[...]``, of a DTensor sharded in any way."""
    classes, of_rows = logits.shape[-1], dataclasses.replace(loss, reduction="none")
    local = localise(loss.op, logits, [targets.unsqueeze(-1)])
    group, start = _vocabulary_group(loss.op, local)
    if class_weight is not None and group is not None:
        raise ValueError(
            f"{loss.op}: class_weight with logits {shape(logits)} that are sharded on the vocabulary; gather them first"
        )
    local_targets = local.given(0).squeeze(-1)
    check_range(loss, local_targets, classes)
    options: dict[str, Any] = {"class_weight": class_weight, "start": start, "group": group, "inplace": inplace}
    results = plain_loss(of_rows, local.x, local_targets, classes, **options)
    return tuple(_wrap_rows(local, one) for one in results)


def check_operands(loss: Loss, logits: Tensor, targets: Tensor, inplace: bool) -> None:
    """Raise unless the logits are a tensor ``[..., vocab]`` with a target for each row, see `cross_entropy`."""
    check_float(loss.op, "logits", logits, min_ndim=1)
    check_targets(loss.op, "logits", logits, targets)
    if inplace and logits.is_leaf and logits.requires_grad:
        raise ValueError(
            f"{loss.op}: inplace_backward would write the gradient over logits {shape(logits)} that are a leaf; leave "
            "it out, or give the logits that a model computed"
        )


def check_targets(op: str, name: str, rows: Tensor, targets: object) -> None:
    """Raise unless the targets are integers, one for each row of a tensor ``[..., columns]``, on the same device."""
    if not isinstance(targets, torch.Tensor):
        raise TypeError(f"{op}: targets must be a tensor, got {type(targets).__name__}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(
            f"{op}: targets must be class numbers, int64 of shape {list(rows.shape[:-1])}, got {targets.dtype} of "
            f"shape {shape(targets)}; for class probabilities use torch.nn.functional.cross_entropy"
        )
    if targets.shape != rows.shape[:-1]:
        raise MismatchError(
            f"{op}: targets of shape {shape(targets)} are not one for each row of the {name} {shape(rows)}, which "
            f"takes {list(rows.shape[:-1])}; classes are the last dimension"
        )
    if rows.shape[-1] == 0:
        raise ValueError(f"{op}: the {name} {shape(rows)} have no columns")
    check_same_device(op, rows, "targets", targets)


def check_class_weight(op: str, rows: Tensor, class_weight: Tensor | None, classes: int) -> None:
    """Raise unless there is one floating-point weight for each class, on the device of the rows, or None."""
    if class_weight is None:
        return
    check_float(op, "class_weight", class_weight)
    if class_weight.shape != (classes,):
        raise MismatchError(f"{op}: class_weight must be [{classes}], one for each class, got {shape(class_weight)}")
    check_same_device(op, rows, "class_weight", class_weight)
    if class_weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: class_weight gets no gradient; pass class_weight.detach()")


def check_range(loss: Loss, targets: Tensor, classes: int) -> None:
    """Raise IndexError for a target out of range, on the CPU only, because elsewhere the check is not free."""
    if not targets.is_cpu or needs_reference((targets,)):
        return
    wrong = (targets != loss.ignore_index) & ((targets < 0) | (targets >= classes))
    if wrong.any():
        position = wrong.nonzero()[0].tolist()
        raise IndexError(
            f"{loss.op}: target {int(targets[tuple(position)])} at {position} is out of range: there are {classes} "
            f"classes from 0 on, and ignore_index is {loss.ignore_index}"
        )


def _vocabulary_group(op: str, local: Local) -> tuple[Any, int]:
    """Return the process group sharding the last dimension of a DTensor, and the start of the local shard.

    Without such a group, returns None and 0.
    """
    columns = len(local.shape) - 1
    dims = [n for n, placement in enumerate(local.placements) if placement.is_shard(columns)]
    if not dims:
        return None, 0
    if len(dims) > 1:
        raise ValueError(
            f"{op}: the vocabulary of logits {list(local.shape)} is sharded over the mesh dimensions {dims}; shard it "
            "over one"
        )
    return local.mesh.get_group(dims[0]), local.offset(columns)


def _wrap_rows(local: Local, losses: Tensor) -> Tensor:
    """Wrap the losses of local rows as a DTensor with the placements of the logits.

    They are replicated over a mesh dimension on which the vocabulary was sharded.
    """
    if local.mesh is None:
        return losses
    from torch.distributed.tensor import Replicate

    columns = len(local.shape) - 1
    placements: Sequence[Any] = [Replicate() if one.is_shard(columns) else one for one in local.placements]
    return dataclasses.replace(local, placements=placements, shape=local.shape[:-1]).wrap(losses)
