"""Scripts of test cases run by two gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

SECONDS = 240


def run_by_two(script: Path, folder: Path) -> None:
    """Run ``script rank rendezvous`` as two ranks, stop both after a time limit, and show what they printed."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FUSED_BACKEND": "reference"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "rendezvous")],
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
            outputs.append(process.communicate(timeout=SECONDS)[0])
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


def leave() -> NoReturn:
    """End a rank that has passed, without Python's shutdown.

    A thread of gloo that asks for the interpreter lock during shutdown aborts the process ("terminate called without
    an active exception").
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
