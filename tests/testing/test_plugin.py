"""The plugin of pytest: golden files are written by an option, compared without it, and missed where there is none."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.{activation}(self.up(x)))

def test_the_mlp_is_as_it_was(graph_of, golden):
    model = nn.Sequential(Mlp(), Mlp())
    golden(graph_of(model, torch.randn(2, 8), "0"))
    golden(graph_of(model, torch.randn(2, 8), "1"), "second")
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "fxschedule.pytest_plugin", "-p", "no:cacheprovider", *options)


def test_golden_files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_mlp=TEST.format(activation="relu"))
    missing = run(pytester)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no golden file*test_the_mlp_is_as_it_was.txt"])
    run(pytester, "--update-golden").assert_outcomes(passed=1)
    assert "relu(" in (pytester.path / "golden" / "second.txt").read_text()
    run(pytester).assert_outcomes(passed=1)
    pytester.makepyfile(test_mlp=TEST.format(activation="tanh"))
    other = run(pytester)
    other.assert_outcomes(failed=1)
    other.stdout.fnmatch_lines(["*>>> *relu(*| *tanh(*"])


def test_pytest_finds_the_plugin() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["entry-points"]["pytest11"] == {"fxschedule": "fxschedule.pytest_plugin"}
