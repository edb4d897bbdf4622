"""The launcher example under ``torchrun``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tutorials" / "train_distributed.py"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "pp", "tp"), [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 2, 1)])
def test_training_under_torchrun(processes: int, pp: int, tp: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = [f"--pp={pp}", f"--tp={tp}", "--steps=12", f"--rank-logs={tmp_path}", f"--save={tmp_path / 'saved'}"]
    done = subprocess.run([*command, str(SCRIPT), *options], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "training" in done.stdout + done.stderr
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(processes)]
    losses = [[float(found) for found in re.findall(r"loss ([\d.]+)", log)] for log in logs]
    trained = [each for each in losses if each]
    assert trained and all(each[-1] < each[0] - 0.3 for each in trained)
    assert (tmp_path / "saved" / ".metadata").exists()
