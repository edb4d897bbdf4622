"""Command line: see the package."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

import benchmarks.gpu
from benchmarks.gpu.log import Log
from benchmarks.gpu.queue import run_queue, working_method
from benchmarks.gpu.table import render

PARTS = {"A": "benchmarks.gpu.checked", "B": "benchmarks.gpu.timed_ops", "C": "benchmarks.gpu.models"}
BESIDE = {"A": 14, "B": 12, "C": 4}
"""How many items run at once on a card, where they do not measure; at most one a processor."""
_PRELOADED = {
    "all": ["torch", "triton", "fused"],
    "A": ["pytest", "schedule"],
    "B": ["torch._dynamo", "benchmarks.gpu.timed_ops"],
    "C": [
        "torch._dynamo",
        "benchmarks.gpu.models",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "qwen3_moe")),
    ],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--budget", type=float, default=540, help="seconds after which no more items run")
    parser.add_argument("--only", nargs="+", default=[""], help="the items whose names contain one of these texts")
    parser.add_argument("--without", nargs="+", default=[], help="no items whose names contain one of these texts")
    parser.add_argument("--dry-run", action="store_true", help="the same queue on the CPU, at tiny sizes")
    parser.add_argument("--output", type=Path, help="the file of results, build/gpu_PART.jsonl by default")
    return parser.parse_args()


def surroundings(device: str) -> dict[str, str]:
    """Return the card, the date and the versions of what is measured."""
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU (dry run)"
    versions = {}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    return {"card": card, "date": str(datetime.date.today()), "python": platform.python_version(), **versions}


def prepare(part: str, device: str, caches: str) -> None:
    """Set the environment of the children, and what the server that forks them imports once.

    Nothing that it imports may start CUDA, which does not survive a fork.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/inductor"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if device == "cpu":
        os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    multiprocessing.set_forkserver_preload([*_PRELOADED["all"], *_PRELOADED[part]])


def main() -> int:
    """Run a part, print its table, and return 2 without a card, else 0."""
    options = arguments()
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device: --dry-run goes through the same queue on the CPU", file=sys.stderr)
        return 2
    start, device = time.monotonic(), "cpu" if options.dry_run else "cuda"
    log = Log(options.output or Path("build") / f"gpu_{options.part}.jsonl")
    with tempfile.TemporaryDirectory() as caches:
        prepare(options.part, device, caches)
        log.start(surroundings(device))
        items = importlib.import_module(PARTS[options.part]).items(device)
        items = [item for item in items if any(text in item.name for text in options.only)]
        items = [item for item in items if not any(text in item.name for text in options.without)]
        beside = min(BESIDE[options.part] if device == "cuda" else 64, os.cpu_count() or 1)
        method = working_method(log, device)
        run_queue(items, log, options.budget - (time.monotonic() - start), beside, method)
    print(render(log.read(), options.part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
