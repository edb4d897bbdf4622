"""How long it takes to schedule GPT-2 on the meta device, beside ``torch.export`` of the same model, as layers grow.

Scheduling is everything ``schedule.optimize`` does: the recorded run, tracing for train and eval, matching every rule
in every module, rewriting, generating the dispatch. Both run in this process, alternating; medians of several.
Run ``python -m benchmarks.compile_time``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

import schedule
from benchmarks.timing import write_json
from schedule.runtime import state_of


def _model(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = hf.GPT2Config(n_layer=layers, use_cache=False)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        ids = torch.zeros(2, 64, dtype=torch.long)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _schedule(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    schedule.optimize(model, batch, cost_guard=False)
    if state_of(model.get_submodule("transformer.h.0.mlp")) is None:
        raise SystemExit("nothing was rewritten")


def _export(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    torch.export.export(model, (), batch, strict=False)


def _seconds(run: Callable[[nn.Module, dict[str, torch.Tensor]], None], layers: int) -> float:
    model, batch = _model(layers)
    gc.collect()
    start = time.perf_counter()
    run(model, batch)
    return time.perf_counter() - start


def measure(sizes: list[int], rounds: int) -> list[dict[str, float]]:
    """One row a depth: median seconds of ours and of export, and ours per layer."""
    _seconds(_schedule, 1), _seconds(_export, 1)
    rows = []
    for layers in sizes:
        ours, export = [], []
        for _ in range(rounds):
            ours.append(_seconds(_schedule, layers))
            export.append(_seconds(_export, layers))
        row = {"layers": layers, "ours": statistics.median(ours), "export": statistics.median(export)}
        rows.append({**row, "ours_min": min(ours), "ours_max": max(ours), "per_layer": row["ours"] / layers})
    return rows


def main() -> None:
    """Measure, print, write JSON; exit 1 if export of the deepest model is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compile_time.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = measure(options.layers, options.rounds)
    table = Table("layers", "ours s", "spread", "torch.export s", "ours / export", "ours ms per layer")
    for row in rows:
        table.add_row(
            str(row["layers"]),
            f"{row['ours']:.2f}",
            f"{row['ours_min']:.2f}–{row['ours_max']:.2f}",
            f"{row['export']:.2f}",
            f"{row['ours'] / row['export']:.2f}",
            f"{row['per_layer'] * 1e3:.1f}",
        )
    Console().print(table)
    write_json(options.out, rows)
    if rows[-1]["ours"] >= rows[-1]["export"]:
        raise SystemExit("scheduling takes longer than torch.export")


if __name__ == "__main__":
    main()
