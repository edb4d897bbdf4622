"""Sharded checkpoints with ``torch.distributed.checkpoint``: saved on one mesh, loaded on any other.

A checkpoint holds whole tensors under the names of the whole model, each once, whatever shared them out: tensor
parallelism, packed parts, FSDP, stages of a pipeline. ``schedule.build(sch, init_weights=folder)`` reads one into a
model on the meta device; on a single process, ``build(…).save_pretrained(folder)`` makes it transformers' own.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from schedule.distributed.checkpoint.layout import Layout
from schedule.distributed.checkpoint.pieces import Pieces
from schedule.util.tensors import local_part


def sharded_state(model: nn.Module) -> dict[str, Any]:
    """The parameters and saved buffers of ``model``, for ``dcp.save`` and ``dcp.load``; the memory is the model's.

    Args:
        model: whole, sharded, on FSDP, or this rank's stages of a pipeline.

    Returns:
        name in the whole model → this rank's share; a tied tensor under its first name only.

    Raises:
        ShardError: a tensor that is neither whole nor a share, such as partial sums.
    """
    whole = getattr(model, "whole", model)
    first: dict[int, str] = {}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        first.setdefault(id(tensor), name)
    found: dict[str, Any] = {}
    saved = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            found[first.get(id(tensor), name)] = Pieces(local_part(tensor), Layout.of(tensor))
    return found


def save_sharded(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Save ``model`` to a folder; all ranks call it, and what several hold is written once.

    Args:
        model: as for :func:`sharded_state`.
        path: the same folder on all ranks.
    """
    dcp.save(sharded_state(model), checkpoint_id=path, no_dist=not dist.is_initialized())


def load_sharded(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load ``model`` in place from a folder, saved on whatever mesh; all ranks call it.

    Args:
        model: as for :func:`sharded_state`; with data, unlike for ``schedule.build``.
        path: the same folder on all ranks.
    """
    dcp.load(sharded_state(model), checkpoint_id=path, no_dist=not dist.is_initialized())
