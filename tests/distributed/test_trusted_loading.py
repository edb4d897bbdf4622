"""Checkpoints of strangers: nothing that their pickles name is called."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import schedule
from schedule.distributed.checkpoint import load_sharded, save_sharded
from schedule.distributed.checkpoint.trusted_loading import load_into, read_metadata
from tests.distributed.blocks import Mlp


class Evil:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.call = function, given

    def __reduce__(self) -> Any:
        return self.call


CALLS = [(os.system, "touch ran"), (eval, "open('ran', 'w')"), (torch.load, "ran"), (getattr, OrderedDict, "fromkeys")]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].__name__)
@pytest.mark.parametrize("where", ["metadata", "size", "settings"])
def test_a_checkpoint_calls_nothing(where: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    if where == "settings":
        dcp.save({"optimizer.settings.a": Evil(*call)}, checkpoint_id=tmp_path / "saved", no_dist=True)
        with pytest.raises(CheckpointException, match=r"[Ww]eights"):
            load_into({"optimizer.settings.a": 0.1}, tmp_path / "saved")
    else:
        save_sharded(model, tmp_path / "saved", optimizer)
        path = tmp_path / "saved" / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        if where == "metadata":
            metadata = Evil(*call)
        else:
            metadata.planner_data = Evil(*call)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(schedule.NotApplicable, match=rf"more than data: .*{call[0].__name__}"):
            load_sharded(model, tmp_path / "saved", optimizer)
        with torch.device("meta"):
            fresh = Mlp()
        with pytest.raises(schedule.NotApplicable, match="more than data"):
            schedule.build(schedule.create_schedule(fresh), init_weights=tmp_path / "saved")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["os", "Path", "FileSystemWriter", "FileSystem", "_write_item", "no_such_name"])
def test_metadata_name_records_only(name: str, tmp_path: Path) -> None:
    """Not what the modules of metadata import, nor what works with files."""
    module = "torch.distributed.checkpoint.filesystem"
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n.".encode())
    with pytest.raises((schedule.NotApplicable, AttributeError), match=name):
        read_metadata(tmp_path)


def test_own_checkpoints_are_data(tmp_path: Path) -> None:
    model, again = Mlp(), Mlp()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=lr) for each, lr in ((model, 0.5), (again, 0.1))]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    save_sharded(model, tmp_path, optimizers[0])
    load_sharded(again, tmp_path, optimizers[1])
    assert optimizers[1].param_groups[0]["lr"] == 0.5
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert isinstance(again, nn.Module)
