"""Tests on several processes: every case runs on each rank of one gloo process group.

The processes start once for all test files, forked from one that has imported what cases need, since importing takes
longer than a case. A case that raises on one rank may leave the others waiting: what has not finished by its limit is
killed, and the next case gets new processes.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = Callable[[Any], None]

_START_LIMIT = 300.0
_COLLECTIVE_LIMIT = timedelta(seconds=30)
_PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.debug",
    "torch.optim",
    "tests.distributed.blocks",
    "tests.distributed.models",
]


class Ranks:
    """Processes that run cases, one after another."""

    def __init__(self, ranks: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        port, pipes = _free_port(), [context.Pipe() for _ in range(ranks)]
        self.pipes: list[Connection] = [ours for ours, _ in pipes]
        self.processes: list[Any] = [
            context.Process(target=_work, args=(rank, ranks, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        for pipe in self.pipes:  # importing torch takes most of a case's time on a busy machine
            if not pipe.poll(_START_LIMIT) or pipe.recv() != "ready":
                self.stop()
                raise RuntimeError(f"{ranks} processes did not start within {_START_LIMIT:.0f} s")

    def run(self, case: Case, limit: float) -> str:
        """ "" or what went wrong on each rank."""
        for pipe in self.pipes:
            pipe.send(case)
        deadline = time.monotonic() + limit
        found: dict[int, str] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic()) if not any(found.values()) else 2.0):
                    found[rank] = pipe.recv()
            except EOFError:
                found[rank] = "it died"
        failed = [f"rank {rank}:\n{error}" for rank, error in found.items() if error]
        missing = [rank for rank in range(len(self.pipes)) if rank not in found]
        if missing:
            failed.append(f"ranks {missing} did not finish within {limit:.0f} s, or after another had failed")
        return "\n".join(failed)

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_running: dict[int, Ranks] = {}


@atexit.register
def stop() -> None:
    """End all processes."""
    while _running:
        _running.popitem()[1].stop()


def run_one(case: Case, ranks: int = 2, limit: float = 120.0) -> str:
    """Run one case; "" or the ranks' errors.

    Args:
        case: a function at the top of a module, called with the one-dimensional mesh ``("tp",)``.
        ranks: how many processes.
        limit: seconds, after which it counts as hung.
    """
    if ranks not in _running:
        _running[ranks] = Ranks(ranks)
    error = _running[ranks].run(case, limit)
    if error:  # a collective may be half done
        _running.pop(ranks).stop()
    return error


def passes(case: Case, ranks: int = 2, limit: float = 120.0) -> None:
    """Fail the test unless ``case`` passes on every rank."""
    error = run_one(case, ranks, limit)
    if error:
        pytest.fail(error, pytrace=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _work(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ["FUSED_BACKEND"] = "reference"  # kernels have tests of their own
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=_COLLECTIVE_LIMIT)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    pipe.send("ready")
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            case(mesh)
        except (Exception, pytest.fail.Exception):  # whatever a case raises is its result
            pipe.send(traceback.format_exc(limit=-12))
        else:
            pipe.send("")
