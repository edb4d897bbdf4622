"""The profile of a step: valid, with each rewrite and its backward pass named, and nothing left behind."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of


class Block(nn.Module):
    """A linear layer with an activation to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 128)
        self.back = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(nn.functional.gelu(self.fc(x)))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert set(content) >= {"traceEvents", "schemaVersion"}
    events: list[dict[str, Any]] = content["traceEvents"]
    for event in events:
        assert "ph" in event and "name" in event and "pid" in event and "tid" in event
        assert event["ph"] != "X" or ("ts" in event and event["dur"] >= 0)
    return events


def test_each_rewrite_is_named_by_its_rule_and_module(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(8, 64)
    sch = schedule.create_schedule(model, (x,))
    schedule.optimize(sch, cost_guard=False)
    states = [state_of(module) for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = schedule.profile_step(sch, tmp_path / "step.json")
    names = Counter(event["name"] for event in _events(path) if event.get("cat") == "user_annotation")
    for number in (0, 1):
        assert names[f"bias_gelu: blocks.{number}"] == 1
        assert names[f"bias_gelu: blocks.{number} (backward)"] >= 1
    assert [state_of(module) for module in model.modules()] == states
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(state.fallbacks for state in states if state is not None)


def test_a_part_and_another_batch(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(8, 64)
    sch = schedule.create_schedule(model, (x,))
    schedule.optimize(sch["blocks.1"], cost_guard=False)  # type: ignore[arg-type]
    path = schedule.profile_step(sch["blocks.1"], tmp_path / "step.json", (torch.randn(3, 64),))  # type: ignore[arg-type]
    names = {event["name"] for event in _events(path)}
    assert "bias_gelu: blocks.1" in names
    assert "bias_gelu: blocks.0" not in names


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    class Never(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model ran")

    sch = schedule.create_schedule(Never(), (torch.randn(8, 64),))
    with pytest.raises(schedule.NotApplicable, match="cannot be written"):
        schedule.profile_step(sch, tmp_path / "none" / "step.json")


def test_a_model_that_does_not_train_is_refused(tmp_path: Path) -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("no labels")
            return super().forward(x)

    sch = schedule.create_schedule(Broken(), (torch.randn(8, 64),))
    with pytest.raises(schedule.NotApplicable, match=r"does not train on its example inputs.*no labels"):
        schedule.profile_step(sch, tmp_path / "step.json")
    assert not (tmp_path / "step.json").exists()
