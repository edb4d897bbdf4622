"""Under ``torchrun``: models against the single-device run, and the launcher example."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_models import MINIMUM

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tutorials" / "train_distributed.py"


def command(processes: int) -> list[str]:
    """What starts that many."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [2, 4])
def test_models_under_torchrun(processes: int) -> None:
    script = [*command(processes), "-m", "tests.distributed.under_torchrun"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1500, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"trains alike on {processes}") == 2 * len(MINIMUM)


def losses(folder: Path, processes: int, *options: str) -> list[float]:
    """Run the script with 20 steps, or as many as ``options`` say."""
    written = folder / "losses.json"
    script = [*command(processes), str(SCRIPT), "--eps=1e-3", f"--losses={written}", *options]
    done = subprocess.run(script, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    (curve,) = json.loads(written.read_text()).values()
    found: list[float] = curve
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layout",
    [
        ("--tp=2", "--checkpoint"),
        ("--pp=2", "--tp=2"),
        ("--pp=2", "--checkpoint"),
        ("--tp=2", "--rules=after", "--checkpoint"),
    ],
    ids=" ".join,
)
def test_four_processes_then_two_or_one(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Ten steps on four processes, FSDP2 over what the layout leaves, and ten more on others are twenty on one."""
    expected, saved = losses(tmp_path, 1), tmp_path / "saved"
    assert len(expected) == 20 and expected[-1] < expected[0] - 0.3
    assert losses(tmp_path, 4, *layout, "--steps=10", f"--save={saved}") == pytest.approx(expected[:10], rel=1e-4)
    for options in (layout[:1], ()):
        resumed = losses(tmp_path, 1 + len(options), *options, f"--resume={saved}")
        assert resumed == pytest.approx(expected[10:], rel=1e-4), options


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "pp", "tp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 2, 1)])
def test_training_under_torchrun(processes: int, pp: int, tp: int, tmp_path: Path) -> None:
    options = [f"--pp={pp}", f"--tp={tp}", "--steps=12", f"--rank-logs={tmp_path}", f"--save={tmp_path / 'saved'}"]
    done = subprocess.run([*command(processes), str(SCRIPT), *options], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "training" in done.stdout + done.stderr
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(processes)]
    losses = [[float(found) for found in re.findall(r"loss ([\d.]+)", log)] for log in logs]
    trained = [each for each in losses if each]
    assert trained and all(each[-1] < each[0] - 0.3 for each in trained)
    assert (tmp_path / "saved" / ".metadata").exists()
