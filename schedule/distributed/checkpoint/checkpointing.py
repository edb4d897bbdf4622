"""Sharded checkpoints with ``torch.distributed.checkpoint``: saved on one mesh, loaded on any other.

A checkpoint stores each whole tensor once, under its name in the whole model, regardless of how it was sharded: tensor
parallelism, packed parts, FSDP, pipeline stages. ``schedule.build(sch, init_weights=folder)`` reads one into a
model on the meta device. In a single process, ``build(…).save_pretrained(folder)`` converts it to a transformers
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from fused.sharding import local_part
from fused.torch_internals.sharded import initialize_state
from schedule.distributed.checkpoint.pieces import Pieces
from schedule.distributed.checkpoint.stored_layout import Layout
from schedule.distributed.checkpoint.trusted_loading import load_into
from schedule.distributed.checkpoint.writing import ReplacingWriter
from schedule.util.errors import ShardError

_SETTINGS, _STATE = "optimizer.settings.", "optimizer.state."


def sharded_state(model: nn.Module) -> dict[str, Any]:
    """Return the parameters and saved buffers of ``model`` for ``dcp``, sharing memory with the model.

    Args:
        model: a whole model, a sharded one, one under FSDP, or this rank's pipeline stages.

    Returns:
        name in the whole model → this rank's shard; a tied tensor appears under its first name only.

    Raises:
        ShardError: a tensor is neither whole nor sharded, for example partial sums.
    """
    return {name: Pieces(local_part(tensor), Layout.of(tensor)) for name, tensor in _named(model)}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and saved buffers with their first names in the whole model."""
    whole = getattr(model, "whole", model)
    first: dict[int, str] = {}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        first.setdefault(id(tensor), name)
    saved = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            yield first.get(id(tensor), name), tensor


def save_sharded(
    model: nn.Module, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save ``model`` to a folder.

    All ranks must call it. Data held by several ranks is written once. A checkpoint that is in the folder already is
    replaced in one step at the end, so it stays whole if a rank dies during the save.

    Args:
        model: as for :func:`sharded_state`.
        path: the same folder on all ranks.
        optimizer: of the parameters of ``model``; its state and the settings of its groups are saved too.

    Raises:
        ShardError: a rank failed or died, or the optimizer has parameters that the model has not.
    """
    state = sharded_state(model) | ({} if optimizer is None else optimizer_state(model, optimizer))
    try:
        dcp.save(state, storage_writer=ReplacingWriter(path), no_dist=not dist.is_initialized())
    except (RuntimeError, CheckpointException) as error:
        raise ShardError(
            f"saving to {os.fspath(path)} failed: {str(error).strip().splitlines()[-1]}",
            fix="look at what the ranks said first; what was saved there before is still whole",
        ) from error


def load_sharded(
    model: nn.Module, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load ``model`` in place from a folder saved on any mesh, called by all ranks.

    Args:
        model: as for :func:`sharded_state`. Unlike for ``schedule.build``, its tensors must not be on the meta device.
        path: the same folder on all ranks.
        optimizer: as for :func:`save_sharded`, of the same class as the one that was saved. It may divide the
            parameters into other groups, if those of a group had the same settings.

    Raises:
        ShardError: the optimizer has parameters that the model has not, or a group of which parameters were saved with
            different settings, such as their learning rate.
    """
    state, settings = sharded_state(model), list[dict[str, Any]]()
    if optimizer is not None:
        initialize_state(optimizer)
        own = optimizer_state(model, optimizer)
        saved = {name: value for name, value in own.items() if name.startswith(_SETTINGS)}
        load_into(saved, path)
        settings = _settings_of_groups(model, optimizer, saved)
        state |= {name: value for name, value in own.items() if name not in saved}
    load_into(state, path)
    for group, values in zip(optimizer.param_groups if optimizer is not None else (), settings, strict=True):
        group.update(values)


def _settings_of_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the settings that the parameters of each group were saved with."""
    names = {id(parameter): name for name, parameter in _named(model)}
    found: list[dict[str, Any]] = []
    for at, group in enumerate(optimizer.param_groups):
        settings = {
            names[id(parameter)]: dict(saved[_SETTINGS + names[id(parameter)]]) for parameter in group["params"]
        }
        first, values = next(iter(settings.items()), ("", {}))
        for name, others in settings.items():
            different = [key for key in values if values[key] != others.get(key)]
            if different:
                raise ShardError(
                    f"group {at} of the optimizer has {first} and {name}, whose {', '.join(different)} differed",
                    fix="make the optimizer with groups that keep them apart",
                )
        found.append(values)
    return found


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of ``optimizer`` for ``dcp``: by parameter, tensors and the settings of its group.

    Raises:
        ShardError: it has a parameter that ``model`` has not, or a state that is not a tensor.
    """
    names = {id(parameter): name for name, parameter in _named(model)}
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        settings = tuple((name, value) for name, value in group.items() if name != "params")
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise ShardError(
                    f"the optimizer has a parameter of {list(parameter.shape)} that the model has not",
                    fix="make the optimizer of model.parameters() after schedule, build and fully_shard",
                )
            found[_SETTINGS + name] = settings
            for key, value in optimizer.state[parameter].items():
                if not isinstance(value, Tensor):
                    raise ShardError(f"{key} of the optimizer, for {name}, is no tensor but {type(value).__name__}")
                found[f"{_STATE}{name}.{key}"] = Pieces(local_part(value), Layout.of(value))
    return found
