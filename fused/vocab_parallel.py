"""Cross entropy of logits sharded on the vocabulary, without gathering full rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from fused.checks import shape
from fused.cross_entropy import check_operands, check_range, losses_of_shards
from fused.loss import Loss
from fused.loss_autograd import plain_loss
from fused.sharding import sharded

Tensor = torch.Tensor


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Compute Megatron's loss of each row of logits sharded on the vocabulary over a process group.

    One pass over the local logits, and two all-reduces of one to three numbers per row: the highest logit, then the
    sums (exponentials, the target's logit, and with smoothing the logits).

    Args:
        logits: ``[..., vocab / processes]``, the same number of columns on every process, in the order of ranks; or a
            DTensor ``[..., vocab]`` sharded on the last dimension (possibly unevenly), and on others.
        targets: ``[...]``, integers from 0 to vocab − 1 (in the full vocabulary), or `ignore_index`; the same on
            every process of the group.
        label_smoothing: ε from 0, below 1, as in Megatron: it is a smoothing of ``ε·vocab / (vocab − 1)`` in
            `cross_entropy`. Megatron uses the vocabulary and mean of the local shard, so its processes disagree; here
            both are those of the full vocabulary.
        tp_group: the process group for plain logits, None for the default one; a DTensor has its own. Anything with a
            ``size()`` of 1 will do for whole logits.
        ignore_index, z_loss, softcap, inplace_backward: as in `cross_entropy`.

    Returns:
        ``[...]``, the loss of each row, the same on every process; float32 for 16-bit logits. For a DTensor a DTensor.
        Saves the local logits, the targets and two numbers of each row. The gradient is computed for the local
        logits, and has no second derivative.

    Raises:
        TypeError, ValueError, IndexError: as `cross_entropy`; ValueError if the smoothing is 1, or for plain logits
            without a group and an initialized process group.

    Source: Megatron-LM ``vocab_parallel_cross_entropy``.
    """
    op = "vocab_parallel_cross_entropy"
    loss = Loss(op, ignore_index, label_smoothing, z_loss, softcap, "none").checked()
    if label_smoothing == 1.0:
        raise ValueError(f"{op}: label_smoothing must be below 1, got 1")
    check_operands(loss, logits, targets, inplace_backward)
    if sharded(logits, targets):
        return losses_of_shards(_as_megatron(loss, logits.shape[-1]), logits, targets, inplace_backward)[0]
    group = _of_several(op, logits, tp_group)
    columns = logits.shape[-1]
    classes, start = (columns, 0) if group is None else (columns * group.size(), columns * group.rank())
    loss = _as_megatron(loss, classes)
    check_range(loss, targets, classes)
    return plain_loss(loss, logits, targets, classes, start=start, group=group, inplace=inplace_backward)[0]


def _of_several(op: str, logits: Tensor, tp_group: Any) -> Any:
    """Return the group over which plain logits are sharded, or None for a group of one process."""
    if tp_group is not None:
        return None if tp_group.size() == 1 else tp_group
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{op}: logits {shape(logits)} are a plain tensor and there is no process group to share them over; call "
            "torch.distributed.init_process_group, or use cross_entropy for whole logits"
        )
    return dist.group.WORLD


def _as_megatron(loss: Loss, classes: int) -> Loss:
    """Convert Megatron's label smoothing, spread over the wrong classes only, to the one of `cross_entropy`."""
    if loss.label_smoothing == 0.0 or classes == 1:
        return loss
    return dataclasses.replace(loss, label_smoothing=loss.label_smoothing * classes / (classes - 1))
