"""Logs: each subject says what it promises, as text and as JSON lines; wrong names change nothing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fused
import schedule
from fused.backends.backend_registry import OPS
from schedule.util.logs import SUBJECTS, set_logs


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    for op in OPS.values():
        op._logged.clear()
    yield
    set_logs("")


class Net(nn.Module):
    """Two layers with a rewrite each, and one that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.fc, self.odd = 2.0, nn.Linear(64, 512), Odd()

    def forward(self, x: Tensor) -> Any:
        return self.odd(nn.functional.gelu(self.fc(x)) * self.gain)


class Odd(nn.Module):
    """Reads the data of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x) if float(x.detach().numpy()[0, 0]) < 1e9 else x


def _run() -> nn.Module:
    model, x = Net(), torch.randn(64, 64)
    schedule.optimize(model, (x,), cost_guard=False)
    with warnings.catch_warnings(), fused.backend("reference"):
        warnings.simplefilter("ignore")
        model(x).sum().backward()
        model.gain = "broken"  # type: ignore[assignment]
        with pytest.raises(TypeError):
            model(x)
    return model


def _written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_subject_says_what_it_promises(subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_logs(f"+{subject}", tmp_path / "logs.jsonl")
    _run()
    lines = _written(tmp_path / "logs.jsonl")
    printed = capsys.readouterr().err
    assert lines
    assert {line["subject"] for line in lines} == {subject}
    assert all(f"[fxschedule.{subject}] {line['text']}" in printed for line in lines)
    if subject == "trace":
        assert any(line.get("module") == "" and "fc" in line.get("graph", "") for line in lines)
        refused = next(line for line in lines if line["module"] == "odd")
        assert "test_logs.py" in refused["where"]
    if subject == "match":
        taken = next(line for line in lines if line["status"] == "taken")
        assert (taken["rule"], taken["module"]) == ("bias_gelu", "")
    if subject == "guards":
        assert any("self.gain" in line["text"] and "same 2.0" in line["text"] for line in lines)
    if subject == "fallbacks":
        assert any(line.get("count") == 1 and line["received"] == "float32[64, 64]" for line in lines)
    if subject == "kernels":
        parts = {(line["op"], line["part"], line["backend"]) for line in lines}
        assert {("bias_activation", "forward", "plain torch"), ("bias_activation", "backward", "plain torch")} <= parts


def test_details_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    set_logs("trace,-guards,fallbacks", tmp_path / "logs.jsonl")
    _run()
    lines = _written(tmp_path / "logs.jsonl")
    assert {line["subject"] for line in lines} == {"trace", "fallbacks"}
    assert not any("graph" in line for line in lines)


def test_nothing_is_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    _run()
    assert "[fxschedule" not in capsys.readouterr().err


def test_a_wrong_subject_changes_nothing(tmp_path: Path) -> None:
    set_logs("trace", tmp_path / "logs.jsonl")
    with pytest.raises(schedule.ScheduleError, match=r"no logs of 'fallback'(.|\n)*did you mean 'fallbacks'"):
        schedule.set_logs(["fallback"])
    _run()
    assert {line["subject"] for line in _written(tmp_path / "logs.jsonl")} == {"trace"}


def test_logs_reach_handlers_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fxschedule"):
        _run()
    assert {record.name for record in caplog.records} == {f"fxschedule.{subject}" for subject in SUBJECTS}


@pytest.mark.parametrize(("asked", "said"), [("match,+trace", ""), ("fallback", "did you mean 'fallbacks'?")])
def test_the_environment_sets_them(asked: str, said: str) -> None:
    code = "import logging, schedule; print(logging.getLogger('fxschedule.trace').level)"
    environment = {"FXSCHEDULE_LOGS": asked, "PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.strip() == ("0" if said else str(logging.DEBUG))
    assert said in done.stderr
