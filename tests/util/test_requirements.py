"""Environments with half of what is needed: each is told in a sentence, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
SMALL = """
import torch
from torch import nn
import schedule

model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
report = schedule.optimize(model, torch.randn(2, 8), cost_guard=False)
assert report.applied, report
report.verify(steps=1)
print("rewritten")
"""


def _run(code: str, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(names=set(names)) + code
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["networkx", "rich", "jinja2", "typer"])
def test_a_missing_library_is_named(name: str) -> None:
    ran = _run("import schedule", name)
    assert f"ImportError: fxschedule needs {name}, not installed for {sys.executable}" in ran.stderr
    assert f"-m pip install {name}" in ran.stderr


def test_numpy_and_transformers_are_not_needed() -> None:
    ran = _run(SMALL, "numpy", "transformers")
    assert ran.stdout.endswith("rewritten\n"), ran.stderr


def test_without_transformers_its_tools_say_so() -> None:
    code = """
import importlib.metadata

def gone(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.version = gone
import schedule.huggingface
"""
    ran = _run(code, "transformers")
    assert "ImportError: schedule.huggingface needs transformers 5.0 or newer, and it is not installed" in ran.stderr


def test_transformers_4_is_refused_by_name() -> None:
    ran = _run("import importlib.metadata as m\nm.version = lambda name: '4.57.6'\nimport schedule.huggingface")
    assert "ImportError: schedule.huggingface needs transformers 5.0 or newer, and 4.57.6 is installed" in ran.stderr
    assert "pip install --upgrade 'transformers>=5.0'" in ran.stderr


def test_without_a_compiler_the_formulas_run() -> None:
    ran = _run(SMALL, CXX="/no/such/compiler", PATH="/no/such/folder")
    assert ran.stdout.endswith("rewritten\n"), ran.stderr
