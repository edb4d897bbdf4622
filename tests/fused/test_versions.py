"""Releases: newer ones are named, older ones are refused before any work."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fused import versions


def test_here_all_are_tested() -> None:
    assert versions.untested_releases() == []
    assert f"torch {torch.__version__}" in versions.versions_text()


def test_newer_and_older_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.6"))
    newer, older = versions.untested_releases()
    assert newer == f"torch 2.99.1+cpu is newer than {versions.TESTED['torch'][1]}, the newest tested release"
    assert older == "transformers 4.57.6 is older than 5.0, the oldest supported release"


def test_an_import_says_nothing() -> None:
    """Neither a deprecation of ours, nor a note that torch logs about what we use of it."""
    code = """
import warnings
warnings.filterwarnings("error", category=DeprecationWarning, module="(fused|schedule)")
import fused, schedule
schedule.optimize
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_an_old_torch_is_refused_on_import() -> None:
    code = "import torch; torch.__version__ = '2.5.1'; import fused"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: fxschedule needs torch 2.11 or newer, and this is torch 2.5.1" in ran.stderr
    assert "pip install --upgrade 'torch>=2.11'" in ran.stderr
