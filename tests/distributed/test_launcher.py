"""Under ``torchrun``: models against the single-device run, and the launcher example."""

from __future__ import annotations

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
