"""vocab_parallel_cross_entropy on two gloo processes; the cases are in sharded_losses.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused

CASES = Path(__file__).with_name("sharded_losses.py")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_sharded_logits_give_the_losses_of_whole_ones(tmp_path):
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
            outputs.append(process.communicate(timeout=240)[0])
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


def test_errors_say_what_to_do():
    logits, targets = torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="no process group"):
        fused.vocab_parallel_cross_entropy(logits, targets)
    with pytest.raises(ValueError, match="label_smoothing must be below 1"):
        fused.vocab_parallel_cross_entropy(logits, targets, 1.0)
    with pytest.raises(TypeError, match="class probabilities"):
        fused.vocab_parallel_cross_entropy(logits, logits)
