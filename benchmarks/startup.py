"""Seconds of importing the package and of the command's help: ``python -m benchmarks.startup [--rounds 9]``.

Each statement runs in a new process, in alternating rounds. ``import schedule`` may take 1.15 times as long as
``import torch``, and ``fxschedule --help`` half a second; the script exits with 1 where that does not hold. The first
use of a name, such as ``schedule.optimize``, imports the rest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Timing, interleaved, write_json

RESULTS = Path(__file__).parent / "results" / "startup.json"
MOST_TIMES_TORCH, MOST_SECONDS_OF_HELP = 1.15, 0.5
COMMANDS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import schedule": ["-c", "import schedule"],
    "schedule.optimize": ["-c", "import schedule; schedule.optimize"],
    "import fused": ["-c", "import fused"],
    "import fxschedule": ["-c", "import fxschedule"],
    "fxschedule --help": ["-m", "fxschedule", "--help"],
}


def _running(arguments: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def measure(rounds: int) -> dict[str, Timing]:
    """Return the seconds of each command."""
    return interleaved({name: _running(arguments) for name, arguments in COMMANDS.items()}, rounds)


def main() -> int:
    """Measure, print, write JSON, and return 1 if a command takes longer than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    times = measure(options.rounds)
    torch_seconds = times["import torch"].median
    table = Table("command", "seconds", "quartiles", "× import torch", title="New processes")
    for name, timing in times.items():
        quartiles = f"{timing.low:.2f}, {timing.high:.2f}"
        table.add_row(name, f"{timing.median:.2f}", quartiles, f"{timing.median / torch_seconds:.2f}")
    Console().print(table)
    write_json(options.out, {name: asdict(timing) for name, timing in times.items()})
    return int(
        times["import schedule"].median > MOST_TIMES_TORCH * torch_seconds
        or times["fxschedule --help"].median > MOST_SECONDS_OF_HELP
    )


if __name__ == "__main__":
    sys.exit(main())
