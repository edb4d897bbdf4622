"""DTensor inputs, on two gloo processes; the cases are in sharded_cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("sharded_cases.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ops_on_dtensors_run_on_shards_and_send_nothing(tmp_path):
    root = str(CASES.parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FUSED_BACKEND": "reference"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, str(CASES), str(rank), str(tmp_path / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=120)[0])
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
