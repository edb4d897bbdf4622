"""Scheduling time of GPT-2 and a 70B-shaped Llama on meta against ``torch.export``, by number of layers.

Scheduling is everything ``schedule.optimize`` does: the recorded run, tracing for train and eval, matching every rule
in every module, rewriting, and generating the dispatch. Both run alternately in this process; the table shows medians.
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
from typing import Any

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

import schedule
from benchmarks.timing import write_json
from schedule.runtime.scheduled import state_of


def _gpt2(layers: int) -> Any:
    return hf.GPT2Config(n_layer=layers, use_cache=False)


def _llama_70b(layers: int) -> Any:
    return hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        use_cache=False,
    )


MODELS = {"gpt2": (_gpt2, "transformer.h.0.mlp"), "llama 70B": (_llama_70b, "model.layers.0.mlp")}
LAYERS = {"gpt2": [12, 24, 48, 96], "llama 70B": [20, 40, 80]}


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _schedule(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    schedule.optimize(model, batch, cost_guard=False)


def _export(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    torch.export.export(model, (), batch, strict=False)


def _seconds(run: Callable[[nn.Module, dict[str, torch.Tensor]], None], name: str, layers: int) -> float:
    config, path = MODELS[name]
    with torch.device("meta"):
        model: nn.Module = hf.AutoModelForCausalLM.from_config(config(layers), attn_implementation="eager")
    gc.collect()
    start = time.perf_counter()
    run(model, _batch())
    seconds = time.perf_counter() - start
    if run is _schedule and state_of(model.get_submodule(path)) is None:
        raise SystemExit("nothing was rewritten")
    return seconds


def measure(name: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return one row per depth: median seconds of ours and of export, and ours per layer and per additional layer."""
    _seconds(_schedule, name, 2), _seconds(_export, name, 2)
    rows: list[dict[str, Any]] = []
    for layers in sizes:
        ours, export = [], []
        for _ in range(rounds):
            ours.append(_seconds(_schedule, name, layers))
            export.append(_seconds(_export, name, layers))
        row = {"model": name, "layers": layers, "ours": statistics.median(ours), "export": statistics.median(export)}
        row |= {"ours_min": min(ours), "ours_max": max(ours), "per_layer": row["ours"] / layers}
        if rows:
            row["per_further_layer"] = (row["ours"] - rows[-1]["ours"]) / (layers - rows[-1]["layers"])
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, write JSON, and exit with 1 if scheduling the deepest model takes longer than exporting it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compile_time.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = [row for name in options.only for row in measure(name, LAYERS[name], options.rounds)]
    headings = (
        "model",
        "layers",
        "ours s",
        "spread",
        "torch.export s",
        "ours / export",
        "ms a layer",
        "ms a further layer",
    )
    table = Table(*headings)
    for row in rows:
        table.add_row(
            row["model"],
            str(row["layers"]),
            f"{row['ours']:.2f}",
            f"{row['ours_min']:.2f}–{row['ours_max']:.2f}",
            f"{row['export']:.2f}",
            f"{row['ours'] / row['export']:.2f}",
            f"{row['per_layer'] * 1e3:.1f}",
            f"{row['per_further_layer'] * 1e3:.1f}" if "per_further_layer" in row else "",
        )
    Console().print(table)
    write_json(options.out, rows)
    if rows[-1]["ours"] >= rows[-1]["export"]:
        raise SystemExit("scheduling takes longer than torch.export")


if __name__ == "__main__":
    main()
