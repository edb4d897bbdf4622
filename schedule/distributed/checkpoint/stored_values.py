"""Checkpoint reading for models on the meta device, with each rank reading only its shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schedule.distributed.checkpoint.initialize import initialize, without_data
from schedule.distributed.checkpoint.pieces import Pieces
from schedule.distributed.checkpoint.slots import Slot
from schedule.distributed.checkpoint.trusted_loading import load_into, read_metadata
from schedule.util.errors import NotApplicable
from schedule.util.generators import generator_states, restore_generators

Read = Callable[[Slot, str], Tensor]


def read_weights(root: nn.Module, slots: Sequence[Slot], path: str | os.PathLike[str], device: torch.device) -> None:
    """Load every tensor in ``slots`` from a checkpoint.

    Args:
        root: the model.
        slots: the tensors without data.
        path: a safetensors file, a folder of them written by ``save_pretrained``, or a folder written by
            ``torch.distributed.checkpoint``; all ranks must read the latter together. Buffers that are not
            saved, such as rotary frequencies, are computed as at initialization.
        device: device of the loaded tensors.

    Raises:
        NotApplicable: the checkpoint does not exist, or lacks a parameter with the required name and shape.
    """
    folder = Path(path)
    if (folder / ".metadata").exists():
        unsaved = _read_distributed(root, slots, folder, device)
    else:
        unsaved = _read_safetensors(root, slots, _files(folder), device)
    if unsaved:
        states = generator_states(root)
        with without_data(root):  # what else these modules would initialize is there already
            initialize(root, unsaved, None, device)
        restore_generators(states)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not found:
        raise NotApplicable(
            f"there are no weights at {path}",
            fix="give a .safetensors file, a folder that save_pretrained wrote, or one of torch.distributed.checkpoint",
        )
    return found


def _read_safetensors(
    root: nn.Module, slots: Sequence[Slot], files: Sequence[Path], device: torch.device
) -> list[Slot]:
    from safetensors import safe_open

    with ExitStack() as stack:
        files_open = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        stored = {name: file for file in files_open for name in file.keys()}  # noqa: SIM118 - a file is not a mapping
        named, unsaved = _named(root, slots, stored, str(files[0].parent))
        for slot, name in named.items():
            tensor = stored[name].get_slice(name)
            _check_shape(slot, name, torch.Size(tensor.get_shape()))
            share = slot.empty_share(device)
            if not share.ndim:
                share.copy_(stored[name].get_tensor(name))
            for piece in slot.layout.pieces() if share.ndim else ():
                share[piece.local] = tensor[piece.whole].to(device, share.dtype)
            slot.fill(share)
    return unsaved


def _read_distributed(root: nn.Module, slots: Sequence[Slot], folder: Path, device: torch.device) -> list[Slot]:
    stored = read_metadata(folder).state_dict_metadata
    named, unsaved = _named(root, slots, stored, str(folder))
    shares = {}
    for slot, name in named.items():
        _check_shape(slot, name, getattr(stored[name], "size", torch.Size()))
        shares[slot] = slot.empty_share(device)
    state: dict[str, Any] = {name: Pieces(shares[slot], slot.layout) for slot, name in named.items()}
    load_into(state, folder)
    for slot, share in shares.items():
        slot.fill(share)
    return unsaved


def _named(
    root: nn.Module, slots: Sequence[Slot], stored: Collection[str], where: str
) -> tuple[dict[Slot, str], list[Slot]]:
    """Return the checkpoint name of each saved slot, and the list of unsaved slots."""
    named: dict[Slot, str] = {}
    unsaved, missing = [], []
    for slot in slots:
        names = [name for path in slot.paths for name in _aliases(root, path) if name in stored]
        if names:
            named[slot] = names[0]
        elif slot.persistent and isinstance(slot.tensor, nn.Parameter):
            missing.append(slot.paths[0])
        else:
            unsaved.append(slot)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise NotApplicable(
            f"the checkpoint has no {', '.join(missing[:5])}{more}",
            where=where,
            fix=f"it has {', '.join(sorted(stored)[:5])}, …; use the model class that was saved",
        )
    return named, unsaved


def _aliases(root: nn.Module, path: str) -> list[str]:
    """Return the possible checkpoint names, since transformers saves with or without the base model prefix."""
    base = f"{getattr(root, 'base_model_prefix', '') or 'model'}."
    return [path, f"{base}{path}", path.removeprefix(base), f"model.{path}"]


def _check_shape(slot: Slot, name: str, shape: torch.Size) -> None:
    if shape != slot.layout.shape:
        raise NotApplicable(
            f"{name} is {list(shape)} in the checkpoint and {slot.paths[0]} is {list(slot.layout.shape)} in the model",
            fix="make the model from the configuration that was saved",
        )
