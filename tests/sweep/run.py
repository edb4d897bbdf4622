"""The sweep: every architecture in a process of its own, several at a time, with a limit of time and memory.

Results are kept one file an architecture, so that an interrupted sweep goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import fused
import schedule
from tests.sweep.one import Check, run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "coverage"
BEYOND = ROOT / "build" / "beyond"
PLANS = ROOT / "build" / "plans"
SECONDS = 400  # of processor time, for three stages; a busy machine changes it little
HANGING = 10 * SECONDS  # of the clock
MEMORY = 14 * 2**30  # of address space; a CUDA build of torch takes several GiB of it before any work
_AFTERWARDS = [Path(__file__).with_name(name) for name in ("__main__.py", "coverage.py")]
"""Files that results do not depend on: they choose what is run, and write of it."""


@dataclass
class _Running:
    name: str
    process: BaseProcess
    until: float


def sweep(names: Sequence[str], jobs: int, check: Check, results: Path) -> None:
    """Do ``check`` of ``names``, ``jobs`` at a time, and keep what is found in ``results``."""
    results.mkdir(parents=True, exist_ok=True)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ[variable] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["FUSED_ONEDNN"] = "1"  # every rule, whatever this machine would gain
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([check.__module__])
    columns = TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("sweep", total=len(names))
        running: list[_Running] = []
        waiting = list(reversed(names))
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(context, check, waiting.pop(), results))
                time.sleep(0.05)
                for each in list(_finished(running)):
                    running.remove(each)
                    _conclude(each, results)
                    progress.update(task, advance=1, description=each.name)
        finally:
            for each in running:
                each.process.kill()


def _start(context: Any, check: Check, name: str, results: Path) -> _Running:
    arguments = (check, name, results / f"{name}.json", SECONDS, MEMORY)
    process = context.Process(target=run, args=arguments, daemon=True)
    process.start()
    return _Running(name, process, time.monotonic() + HANGING)


def _finished(running: Sequence[_Running]) -> Iterator[_Running]:
    for each in running:
        if time.monotonic() > each.until:
            each.process.kill()
            each.process.join()
            yield each
        elif not each.process.is_alive():
            each.process.join()
            yield each


def _conclude(done: _Running, results: Path) -> None:
    """Add how the process ended to what it wrote, and what the result holds for."""
    path = results / f"{done.name}.json"
    result = json.loads(path.read_text()) if path.exists() else {"name": done.name, "reasons": {}}
    code = done.process.exitcode
    if code:
        died = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        late = died == "SIGXCPU" or time.monotonic() > done.until
        kind, why = ("too slow", f"more than {SECONDS} s") if late else ("process died", died)
        result["reasons"][kind] = why
    result["of"] = fingerprint(done.name)
    path.write_text(json.dumps(result, indent=1))


def load(results: Path) -> dict[str, dict[str, Any]]:
    """All results there are, by name."""
    found = (json.loads(path.read_text()) for path in sorted(results.glob("*.json")))
    return {result["name"]: result for result in found}


def fingerprint(name: str) -> str:
    """Of all that a result depends on: the architecture's own files, and ours."""
    from tests.sweep.models import sources

    digest = _ours().copy()
    for path in map(Path, sources(name)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _ours() -> Any:
    """The hash of all of our code that a result depends on, to be copied."""
    digest = hashlib.sha256()
    folders = (Path(package.__file__ or "").parent for package in (schedule, fused))
    for folder in (*folders, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            if path not in _AFTERWARDS:
                digest.update(path.read_bytes())
    return digest
