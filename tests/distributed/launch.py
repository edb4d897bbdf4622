"""Tests on several processes: every case runs on each rank of one gloo process group.

The processes start once and run all cases of a module, since starting them takes longer than a case. A case that
raises on one rank may leave the others waiting: the group's own time limit ends that, and the launcher kills what
is left after its limit.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Case = Callable[[Any], None]

_COLLECTIVE_LIMIT = timedelta(seconds=20)


def run(cases: Sequence[Case], ranks: int = 2, limit: float = 120.0) -> dict[str, str]:
    """Run every case on ``ranks`` processes, each given the device mesh; name → "" or the first rank's error.

    Args:
        cases: functions at the top of a module, called with the one-dimensional mesh ``("tp",)``.
        ranks: how many processes.
        limit: seconds after which the processes are killed and unfinished cases count as hung.
    """
    context = mp.get_context("spawn")
    results: Any = context.SimpleQueue()
    port = _free_port()
    processes = [
        context.Process(target=_work, args=(rank, ranks, port, list(cases), results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[str, dict[int, str]] = {case.__name__: {} for case in cases}
    deadline = time.monotonic() + limit
    try:
        while any(len(of_ranks) < ranks for of_ranks in found.values()) and time.monotonic() < deadline:
            if results.empty():
                if not any(process.is_alive() for process in processes):
                    break
                time.sleep(0.02)
                continue
            name, rank, error = results.get()
            found[name][rank] = error
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
    return {name: _verdict(of_ranks, ranks) for name, of_ranks in found.items()}


def _verdict(of_ranks: dict[int, str], ranks: int) -> str:
    failed = [f"rank {rank}:\n{error}" for rank, error in sorted(of_ranks.items()) if error]
    missing = [rank for rank in range(ranks) if rank not in of_ranks]
    if missing:
        failed.append(f"ranks {missing} did not finish: hung, or died")
    return "\n".join(failed)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _work(rank: int, ranks: int, port: int, cases: list[Case], results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=_COLLECTIVE_LIMIT)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    for case in cases:
        torch.manual_seed(0)
        try:
            case(mesh)
        except Exception:  # whatever a case raises is its result
            results.put((case.__name__, rank, traceback.format_exc(limit=-12)))
        else:
            results.put((case.__name__, rank, ""))
    dist.destroy_process_group()
