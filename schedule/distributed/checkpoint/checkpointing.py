"""Sharded checkpoints with ``torch.distributed.checkpoint``: saved on one mesh, loaded on any other.

A checkpoint stores each whole tensor once, under its name in the whole model, regardless of how it was sharded: tensor
parallelism, packed parts, FSDP, pipeline stages. ``schedule.build(sch, init_weights=folder)`` reads one into a
model on the meta device. In a single process, ``build(…).save_pretrained(folder)`` converts it to a transformers
checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fused.sharding import local_part
from schedule.distributed.checkpoint.layout import Layout
from schedule.distributed.checkpoint.pieces import Pieces


def sharded_state(model: nn.Module) -> dict[str, Any]:
    """Return the parameters and saved buffers of ``model`` for ``dcp``, sharing memory with the model.

    Args:
        model: a whole model, a sharded one, one under FSDP, or this rank's pipeline stages.

    Returns:
        name in the whole model → this rank's shard; a tied tensor appears under its first name only.

    Raises:
        ShardError: a tensor is neither whole nor sharded, for example partial sums.
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
    """Save ``model`` to a folder.

    All ranks must call it. Data held by several ranks is written once.

    Args:
        model: as for :func:`sharded_state`.
        path: the same folder on all ranks.
    """
    dcp.save(sharded_state(model), checkpoint_id=path, no_dist=not dist.is_initialized())


def load_sharded(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load ``model`` in place from a folder saved on any mesh, called by all ranks.

    Args:
        model: as for :func:`sharded_state`. Unlike for ``schedule.build``, its tensors must not be on the meta device.
        path: the same folder on all ranks.
    """
    dcp.load(sharded_state(model), checkpoint_id=path, no_dist=not dist.is_initialized())
