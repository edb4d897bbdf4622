"""Each fused op against eager torch, torch.compile of the same expression, torch's own op and Liger-Kernel.

    python -m benchmarks.ops [--quick] [--op NAME] [--device cpu|cuda] [--sizes medium large] [--dtypes float32]

One line per size, dtype and pass. Times are ratios of medians of interleaved runs, with the first and third quartile.
`x copy` is the bandwidth of the op, over the bytes it must move, relative to a copy of as many bytes in the same run.
Saved bytes and the peak memory of each pass are counted, not timed. On a shared machine only the
ratios are meaningful.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.op_table import TABLE, Function, Row, Tensor, nbytes
from benchmarks.timing import Timing, interleaved, write_json
from schedule.report.costs import peak_bytes

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measured:
    """One line of the table.

    Attributes:
        times: seconds by candidate.
        copy: seconds of copying as many bytes as the op must move.
        saved: bytes kept for the backward pass, by candidate.
        least: minimum of bytes to save for the backward pass.
        peak: peak of bytes allocated in the measured pass, by candidate.
    """

    op: str
    size: str
    dtype: str
    work: str
    times: dict[str, Timing]
    copy: Timing
    saved: dict[str, int]
    least: int
    peak: dict[str, int]
    memory_bound: bool

    def ratio(self, other: str) -> float | None:
        """Return our median time relative to another candidate, or None if it was not measured."""
        return self.times["ours"].median / self.times[other].median if other in self.times else None


def leaves(row: Row, size: str, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    """Make the inputs, with ``requires_grad`` set except for integers and frozen positions."""
    torch.manual_seed(seed)
    with torch.device(device):
        given = row.inputs(row.sizes[size])
    made = []
    for position, tensor in enumerate(given):
        tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
        made.append(tensor.requires_grad_(tensor.is_floating_point() and position not in row.frozen))
    return made


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def pass_of(function: Function, inputs: Sequence[Tensor], work: str) -> Callable[[], Any]:
    """Return a function to run one pass: forward under ``no_grad``, or forward and backward."""
    if work == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return function(*inputs)

        return forward
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    with torch.no_grad():
        incoming = [torch.randn_like(out) if out.ndim else torch.ones_like(out) for out in as_tuple(function(*inputs))]

    def both() -> Any:
        return torch.autograd.grad(as_tuple(function(*inputs)), wanted, incoming)

    return both


def must_move(row: Row, inputs: Sequence[Tensor], work: str) -> int:
    """Return the bytes to read and write: inputs and results, and for backward saved tensors and gradients."""
    with torch.no_grad():
        outs = as_tuple(row.ours(*inputs))
    forward = nbytes(*inputs, *outs)
    if work == "forward":
        return forward
    return forward + row.saved(*inputs) + nbytes(*outs, *(tensor for tensor in inputs if tensor.requires_grad))


def saved_bytes(function: Function, inputs: Sequence[Tensor]) -> int:
    """Return the bytes of the distinct storages saved by a forward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(kept.values())


def measure(row: Row, size: str, dtype: torch.dtype, device: str, rounds: int) -> list[Measured]:
    """Measure forward, and forward + backward, of one op at one size."""
    torch._dynamo.reset()
    inputs = leaves(row, size, dtype, device)
    candidates = {"eager": row.eager, "torch.compile": torch.compile(row.eager), "ours": row.ours, **row.peers(device)}
    saved = {name: saved_bytes(function, inputs) for name, function in candidates.items()}
    lines = []
    for work in ("forward", "forward + backward"):
        runs = {name: pass_of(function, inputs, work) for name, function in candidates.items()}
        copied = torch.empty(must_move(row, inputs, work) // 2, dtype=torch.uint8, device=device)
        copy = copied.clone()
        runs["copy"] = lambda copy=copy, copied=copied: copy.copy_(copied)
        times = interleaved(synchronized(runs, device), rounds)
        peak = {name: peak_bytes(run, device) for name, run in runs.items() if name != "copy"}
        lines.append(
            Measured(
                row.name,
                size,
                str(dtype).removeprefix("torch."),
                work,
                {name: time for name, time in times.items() if name != "copy"},
                times["copy"],
                saved,
                row.saved(*inputs),
                peak,
                row.memory_bound,
            )
        )
    return lines


def synchronized(runs: dict[str, Callable[[], Any]], device: str) -> dict[str, Callable[[], Any]]:
    """Return the same calls, each followed by a device synchronization on CUDA."""
    if device != "cuda":
        return runs

    def waiting(run: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            run()
            torch.cuda.synchronize()

        return call

    return {name: waiting(run) for name, run in runs.items()}


def table(lines: Sequence[Measured]) -> Table:
    """Return a table with one line per measurement."""
    shown = Table(title="time of the fused ops over that of others (median, quartiles); below 1 is ahead")
    for heading in ("op", "size", "dtype", "pass", "ours / eager", "/ compile", "/ peer", "x copy", "saved / least"):
        shown.add_column(heading)
    shown.add_column("peak / eager")
    for line in lines:
        peers = [name for name in line.times if name not in ("eager", "torch.compile", "ours")]
        ours = line.times["ours"]
        eager = line.times["eager"].median
        shown.add_row(
            line.op,
            line.size,
            line.dtype,
            "fwd" if line.work == "forward" else "fwd+bwd",
            f"{ours.median / eager:.2f} [{ours.low / eager:.2f}, {ours.high / eager:.2f}]",
            f"{line.ratio('torch.compile'):.2f}",
            "  ".join(f"{name} {line.ratio(name):.2f}" for name in peers) or "-",
            f"{line.copy.median / ours.median:.2f}" if line.memory_bound else "-",
            f"{line.saved['ours'] / max(line.least, 1):.2f}",
            f"{line.peak['ours'] / max(line.peak['eager'], 1):.2f}",
        )
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="medium size, float32, few rounds")
    parser.add_argument("--op", action="append", help="only these ops")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.dtypes, options.rounds = ["medium"], ["float32"], 5
    known = [row.name for row in TABLE]
    for name in options.op or ():
        if name not in known:
            parser.error(f"there is no op {name!r}; there are: {', '.join(known)}")
    return options


def main() -> None:
    options = arguments()
    rows = [row for row in TABLE if not options.op or row.name in options.op]
    work = [(row, size, dtype) for row in rows for size in options.sizes for dtype in options.dtypes]
    lines: list[Measured] = []
    console = Console(width=160)
    for row, size, dtype in track(work, "measuring", console=console):
        lines += measure(row, size, getattr(torch, dtype), options.device, options.rounds)
    console.print(table(lines))
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    name = f"ops_{card.lower().replace(' ', '_')}{'_quick' if options.quick else ''}.json"
    results = [asdict(line) for line in lines]
    write_json(options.output or RESULTS / name, {"device": card, "date": str(datetime.date.today()), "lines": results})


if __name__ == "__main__":
    main()
