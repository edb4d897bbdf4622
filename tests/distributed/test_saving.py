"""Saves that are interrupted leave the checkpoint before whole; optimizers are saved with their models."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from schedule.distributed.checkpoint import load_sharded, save_sharded
from schedule.util.errors import ShardError
from tests.distributed import launch
from tests.distributed.blocks import Mlp, scheduled, shard_mlp
from tests.distributed.models import digest

POINTS = [
    (FileSystemWriter, "prepare_global_plan"),
    (FileSystemWriter, "_write_data"),
    (FileSystemWriter, "finish"),
    (os, "replace"),
    (Path, "unlink"),
]
"""Functions that a save calls, before or after which it is interrupted."""


class Interrupted(RuntimeError):
    pass


def filled(value: float) -> nn.Module:
    model = Mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.mark.parametrize(("owner", "name"), POINTS, ids=lambda part: part if isinstance(part, str) else "")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupted_save(
    owner: Any, name: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before is there until the metadata is replaced; the next save removes what was left behind."""
    save_sharded(filled(1.0), tmp_path)
    files = len(list(tmp_path.iterdir()))
    original = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if after:
            original(*args, **kwargs)
        raise Interrupted(name)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(ShardError, match="what was saved there before is still whole"):
            save_sharded(filled(2.0), tmp_path)
    found = filled(0.0)
    load_sharded(found, tmp_path)
    new = name == "unlink" or (after and name in ("finish", "replace"))
    assert digest(dict(found.named_parameters())) == digest(dict(filled(1.0 + new).named_parameters()))
    save_sharded(filled(3.0), tmp_path)
    load_sharded(found, tmp_path)
    assert digest(dict(found.named_parameters())) == digest(dict(filled(3.0).named_parameters()))
    assert len(list(tmp_path.iterdir())) == files


def dies_while_saving(mesh: Any, folder: Path) -> None:
    """The other rank gets an error as soon as it waits for the dead one."""
    sch, _ = scheduled(filled(1.0), mesh, shard_mlp, 16)
    save_sharded(sch.module, folder)
    with torch.no_grad():
        for parameter in sch.module.parameters():
            parameter.fill_(2.0)
    if mesh.get_local_rank() == 1:
        FileSystemWriter._write_data = lambda *_: os._exit(9)  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(ShardError, match="what was saved there before is still whole"):
        save_sharded(sch.module, folder)
    assert time.monotonic() - start < 60


def test_a_rank_killed_while_saving(tmp_path: Path) -> None:
    try:
        error = launch.run_one(partial(dies_while_saving, folder=tmp_path), limit=100)
    finally:
        launch.stop()
    assert "rank 1:\nit died" in error and "rank 0" not in error
    found = filled(0.0)
    load_sharded(found, tmp_path)
    assert digest(dict(found.named_parameters())) == digest(dict(filled(1.0).named_parameters()))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


def saved_after_three(mesh: Any, folder: Path) -> None:
    """On two ranks, with shards."""
    torch.manual_seed(0)
    sch, _ = scheduled(Mlp(), mesh, shard_mlp, 16)
    optimizer = adam(sch.module)
    stepped(sch.module, optimizer, range(3))
    save_sharded(sch.module, folder, optimizer)


def test_an_optimizer_goes_from_mesh_to_mesh(tmp_path: Path) -> None:
    """Three steps on two ranks and two more on one device are five on one device; the learning rate comes along."""
    launch.passes(partial(saved_after_three, folder=tmp_path))
    torch.manual_seed(0)
    expected, resumed = Mlp(), filled(0.0)
    stepped(expected, adam(expected), range(5))
    optimizer = adam(resumed, lr=1.0)
    load_sharded(resumed, tmp_path, optimizer)
    stepped(resumed, optimizer, range(3, 5))
    for ours, theirs in zip(resumed.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"has a parameter of \[32, 16\] that the model has not"):
        save_sharded(Mlp(), tmp_path, adam(Mlp()))


def grouped(model: nn.Module, *decays: tuple[float, str]) -> torch.optim.Optimizer:
    """A group for each weight decay, of the parameters whose names end so."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in named if name.endswith(end)], "weight_decay": decay}
        for decay, end in decays
    ]
    return torch.optim.AdamW(groups)


def test_an_optimizer_with_other_groups(tmp_path: Path) -> None:
    """Trainers split groups by the mesh of their parameters: settings belong to parameters, not to a number."""
    saved, found = filled(1.0), filled(0.0)
    before = grouped(saved, (0.1, "fc1.weight"), (0.1, "fc2.weight"), (0.0, "bias"))
    stepped(saved, before, range(1))
    save_sharded(saved, tmp_path, before)
    optimizer = grouped(found, (9.0, "weight"), (9.0, "bias"))
    load_sharded(found, tmp_path, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert digest(dict(found.named_parameters())) == digest(dict(saved.named_parameters()))
    with pytest.raises(ShardError, match=r"group 0 .* fc1\.weight and fc1\.bias, whose weight_decay differed"):
        load_sharded(found, tmp_path, grouped(found, (9.0, "")))
