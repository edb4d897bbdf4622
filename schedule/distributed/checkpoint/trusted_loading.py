"""Checkpoints of ``torch.distributed.checkpoint`` read as data: their pickles call nothing else."""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from schedule.util.errors import NotApplicable

_PARTS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_NAMES = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "collections": ("OrderedDict",),
}
_NAMES["pathlib._local"] = _NAMES["pathlib"]  # Python 3.13


def load_into(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Load the entries of ``state`` from a folder in place, called by all ranks.

    Raises:
        NotApplicable: what is in the folder is more than data.
    """
    read_metadata(path)
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized(), planner=_DataPlanner())


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """Return the metadata of the checkpoint in a folder.

    Raises:
        NotApplicable: they are more than data.
    """
    with (Path(path) / ".metadata").open("rb") as file:
        found: Metadata = _Metadata(file).load()
    return found


class _Metadata(pickle.Unpickler):
    """Reader of metadata, which torch writes as a pickle."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if _is_part(module, name) else None
        if found is None or (module in _PARTS and not _is_record(found, module)):
            raise NotApplicable(
                f"the checkpoint is more than data: its metadata would call {module}.{name}",
                fix="load checkpoints of torch.distributed.checkpoint that you trust, or safetensors",
            )
        return found


def _is_record(found: Any, module: str) -> bool:
    """Check whether this is a dataclass or an enum of that module, not what the module imports or works with."""
    if not isinstance(found, type) or found.__module__ != module:
        return False
    return dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)


def _is_part(module: str, name: str) -> bool:
    """Check whether metadata are made of this: a class of metadata, a size, a dtype, a path."""
    if module in _PARTS:
        return name.isidentifier()
    return name in _NAMES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))


class _DataPlanner(dcp.DefaultLoadPlanner):
    """Planner that reads plain data alone where a checkpoint has no tensors, such as the settings of an optimizer."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one entry, or raise ``pickle.UnpicklingError`` if it is more than data."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
