"""What the processor does before a kernel runs: ``python -m benchmarks.launch [--op NAME] [--rounds 15]``.

Each op that has Triton kernels runs forward, and forward and backward, on small tensors, beside Liger-Kernel's op where
that is installed. No GPU is needed: kernels are compiled for sm_90 and their launches do nothing, so what is measured
is the Python of the op and of Triton, and torch's allocations and autograd. Tensors are on the CPU; the few operations
of torch beside the kernels are computed, by all alike. Microseconds of the thread's own time a call, medians of
interleaved rounds with quartiles.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import fused
from benchmarks.op_table import TABLE, Function, Row
from benchmarks.ops import leaves, pass_of
from benchmarks.timing import Timing, interleaved, write_json
from fused.backends import availability

RESULTS = Path(__file__).parent / "results" / "launch.json"
PASSES = ("forward", "forward + backward")
WITHOUT_KERNELS = ("linear", "linear_cross_entropy")
"""Ops that are mostly products of matrices, which a CPU computes here."""


class _Utilities:
    """As much of the driver's functions as loading a kernel needs."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024


def _no_launch(*args: Any, **kwargs: Any) -> None:
    """Launch nothing."""


class _Driver:
    """A driver of an H100 whose launches do nothing."""

    utils = _Utilities()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return _no_launch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def candidates(row: Row) -> dict[str, Function]:
    """Return our op, and Liger's where there is one."""
    found = {"ours": row.ours}
    if row.liger is not None:
        found |= {name: op for name, op in row.peers("cuda").items() if name == "Liger"}
    return found


def measure(row: Row, rounds: int, calls: int) -> dict[str, dict[str, Timing]]:
    """Return the seconds of each pass by candidate."""
    inputs = leaves(row, "tiny", torch.bfloat16, "cpu")
    return {
        work: interleaved(
            {name: pass_of(op, inputs, work) for name, op in candidates(row).items()}, rounds, calls, time.thread_time
        )
        for work in PASSES
    }


def table(measured: dict[str, dict[str, dict[str, Timing]]]) -> Table:
    """Return a table with one line per op and pass."""
    shown = Table(title="µs of the processor a call (median, quartiles), launches left out")
    for heading in ("op", "pass", "ours", "Liger", "ours / Liger"):
        shown.add_column(heading)
    for op, passes in measured.items():
        for work, times in passes.items():
            ours, liger = times["ours"], times.get("Liger")
            ratio = "-" if liger is None else f"{ours.median / liger.median:.2f}"
            shown.add_row(
                op, work, *("-" if one is None else str(one).replace("[", "\\[") for one in (ours, liger)), ratio
            )
    return shown


def main() -> None:
    """Measure the ops, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", help="only these ops")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=100, help="calls in a round")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    driver.set_active(_Driver())  # type: ignore[arg-type]
    availability.why_unavailable = lambda backend, device: None
    # Made of targets on the CPU only. `fused.cross_entropy` is the op, not the module.
    importlib.import_module("fused.cross_entropy").check_range = lambda *args: None  # type: ignore[attr-defined]
    console = Console(width=120)
    if importlib.util.find_spec("liger_kernel") is None:
        console.print("Liger-Kernel is not installed: pip install liger-kernel for its column")
    measured = {}
    with fused.backend("triton"):
        for row in TABLE:
            if row.name not in WITHOUT_KERNELS and (not options.op or row.name in options.op):
                measured[row.name] = measure(row, options.rounds, options.calls)
    console.print(table(measured))
    lines = {op: {work: {k: asdict(v) for k, v in t.items()} for work, t in p.items()} for op, p in measured.items()}
    write_json(options.output, {"triton": triton.__version__, "seconds": lines})


if __name__ == "__main__":
    main()
