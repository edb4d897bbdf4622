"""Bytes that a training step keeps for the backward pass, and its peak: eager torch, torch.compile, sets of rules.

    python -m benchmarks.kept [--only gpt2 llama] [--output FILE]

The models of :mod:`benchmarks.end_to_end` on the CPU, with SDPA (transformers' default) and eager attention, in float32
and under bfloat16 autocast. The figures are the same in each run: what the allocator gave out in the forward and the
loss and its graph still hold (with linear cross entropy the gradient of the head too, which others make later), and the
most in use until the backward pass has ended, from no gradients on. Each is printed and written as it comes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table

import schedule
from benchmarks.end_to_end import MODELS, RESULTS, Batch
from benchmarks.timing import write_json
from schedule.report.costs import kept_bytes, peak_bytes

CANDIDATES = {"eager": None, "torch.compile": None, "default": "default", "memory": "memory", "all": "all"}
"""Candidates, with the rules applied to each."""
ATTENTION, DTYPES = ("sdpa", "eager"), ("float32", "bfloat16")


def measured(name: str, attention: str, dtype: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each candidate and its bytes."""
    torch._dynamo.reset()
    model, autocast = MODELS[name], torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    batch, original = model.batch(), model.build(attention, "cpu")
    for candidate, rules in CANDIDATES.items():
        module = copy.deepcopy(original)
        if rules is not None:
            schedule.optimize(module, batch, rules=rules)
        run: Callable[..., Any] = torch.compile(module) if candidate == "torch.compile" else module
        with autocast:
            for _ in range(2):  # the first calls compile and make graphs
                run(**batch).loss.backward()
            found = {"kept": kept_bytes(partial(_loss, run, batch))}
            module.zero_grad()
            yield candidate, found | {"peak": peak_bytes(partial(_step, run, batch), "cpu")}


def _step(run: Callable[..., Any], batch: Batch) -> None:
    _loss(run, batch).backward()  # type: ignore[no-untyped-call]


def _loss(run: Callable[..., Any], batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = run(**batch).loss
    return loss


def table(lines: list[dict[str, Any]]) -> Table:
    """Return a table with one line a model, in MB, and relative to eager torch."""
    shown = Table(title="kept for the backward pass, and the peak of a step")
    for heading in ("model", "attention", "dtype", "", *CANDIDATES):
        shown.add_column(heading)
    for line in lines:
        for figure in ("kept", "peak"):
            values = {name: line[name][figure] for name in CANDIDATES if name in line}
            cells = [f"{value / 1e6:.0f} MB ({value / values['eager']:.2f})" for value in values.values()]
            shown.add_row(line["model"], line["attention"], line["dtype"], figure, *cells)
    return shown


def main() -> None:
    """Measure the models, print the table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS / "kept_cpu.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    console, lines = Console(width=150), []
    for name, attention, dtype in itertools.product(options.only, ATTENTION, DTYPES):
        line: dict[str, Any] = {"model": name, "attention": attention, "dtype": dtype}
        lines.append(line)
        for candidate, sizes in measured(name, attention, dtype):
            line[candidate] = sizes
            write_json(options.output, lines)
        console.print(table([line]))
    console.print(table(lines))


if __name__ == "__main__":
    main()
