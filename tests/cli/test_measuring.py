"""Commands that measure a step: times and saved bytes, and a profile."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_cli import MLP, data, run


def test_bench_times_in_turns_and_counts_what_is_saved() -> None:
    found = data("bench", MLP, "--no-cost-guard", "--no-compile", "--rounds", "2")
    assert set(found["time"]) == {"eager", "ours"} and found["time"]["eager"]["median"] == 1
    assert found["not_compiled"] == "not asked for"
    assert 0 < found["saved_bytes"]["ours"] <= found["saved_bytes"]["eager"]
    assert found["milliseconds"]["eager"] > 0
    printed = run("bench", MLP, "--no-compile", "--rounds", "1").stdout
    assert "█" in printed and " ms" in printed
    assert "says little about a real size" in " ".join(printed.split())


def test_profile_writes_a_trace_that_names_rules(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    found = data("profile", MLP, "--out", str(path), "--no-cost-guard")
    assert found["applied"] == {"bias_gelu_tanh": 1} and found["profile"] == str(path)
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert any(name.startswith("bias_gelu_tanh: ") for name in names)
    assert "Open it in https://ui.perfetto.dev" in run("profile", MLP, "--out", str(path)).stdout


def test_profile_refuses_a_file_before_any_work(tmp_path: Path) -> None:
    result = run("profile", MLP, "--out", str(tmp_path / "none" / "step.json"))
    assert result.exit_code == 2 and "cannot be written" in result.stderr and "create that folder" in result.stderr
