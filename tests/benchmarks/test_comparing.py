"""Comparisons of models: measured one by one, results stay together; the table shows ratios and MiB."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import beyond, timing
from benchmarks.comparing import Figures, compare
from benchmarks.timing import Timing, merge_json, summarized


def _measured(median: float, rounds: int) -> dict[str, Figures]:
    ours = Timing(median / 2, median / 4, median, (0.5, 0.25, 1.0), median / 3)
    original = Timing(median, median, median, least=median)
    return {
        "original": {"kept": 2**21, "step": original, "operations": 2.0},
        "ours": {"kept": 2**20, "step": ours, "operations": 1.5},
    }


def test_models_measured_one_by_one_stay_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models, out = {"one": partial(_measured, 4.0), "other": partial(_measured, 2.0)}, tmp_path / "results.json"
    for name in models:
        compare("", models, tmp_path / "unused.json", ["--only", name, "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert [each["ours"]["step"]["median"] for each in results.values()] == [2.0, 1.0]
    assert results["one"]["ours"]["kept"] == 2**20
    last = [line for line in capsys.readouterr().out.splitlines() if "ours" in line][-1]
    assert [cell.strip() for cell in last.split("│")[1:-1]] == ["other", "ours", "1", "0.33, 0.50 (0.25–1.00)", "0.75"]


def test_the_load_of_a_round_cancels_out() -> None:
    times = summarized({"original": [1.0, 2.0, 4.0], "ours": [0.5, 1.0, 3.0]})
    assert times["ours"].median == 1.0
    assert times["ours"].ratios[0] == 0.5
    assert times["original"].ratios == (1.0, 1.0, 1.0)
    assert times["ours"].least == 0.5


def test_results_of_other_versions_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results.json"
    merge_json(out, {"one": 1})
    monkeypatch.setattr(timing.torch, "__version__", "0.1")
    merge_json(out, {"other": 2})
    assert json.loads(out.read_text())["results"] == {"other": 2}


@pytest.mark.slow
def test_a_model_is_measured_in_training_and_evaluation() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = beyond.Model(lambda: layers, lambda: {"input": torch.randn(2, 3, 16, 16)}, has_evaluation=True)
    figures = beyond.measured(model, rounds=2)
    assert set(figures) == {*beyond.TRAINING}
    assert all(each["kept"] > 0 and each["step, operations"] > 0 for each in figures.values())  # type: ignore[operator, union-attr]
    assert [name for name, each in figures.items() if "evaluation" in each] == [*beyond.EVALUATION]
