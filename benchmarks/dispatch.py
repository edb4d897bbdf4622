"""Overhead of the generated dispatch when a scheduled module is called instead of the original.

Each module is scheduled with its traced graph, without rewrites, and timed against an unscheduled twin. The column
"dispatch" times a scheduled forward with an empty graph: argument binding, guards and the jump. The limit is 15 µs.
Run ``python -m benchmarks.dispatch``.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.timing import interleaved, write_json
from schedule.capture.recording.recording import record
from schedule.capture.recording.structure import TensorSpec, map_structure
from schedule.capture.specializing.specialization import Specialization, specialize
from schedule.runtime.scheduled import install

LIMIT = 15e-6


def _models() -> dict[str, tuple[nn.Module, list[str]]]:
    gpt2 = hf.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=2)
    llama = hf.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    build = hf.AutoModelForCausalLM.from_config
    return {
        "gpt2": (
            build(gpt2, attn_implementation="eager"),
            ["transformer.h.0.mlp", "transformer.h.0.attn", "transformer.h.0", ""],
        ),
        "llama": (
            build(llama, attn_implementation="eager"),
            ["model.layers.0.mlp", "model.layers.0.self_attn", "model.layers.0", ""],
        ),
    }


def measure(rounds: int) -> list[dict[str, object]]:
    """Return one row per module and mode: times of the dispatch alone, and of whole calls, in seconds."""
    rows: list[dict[str, object]] = []
    for name, (model, paths) in _models().items():
        recording = record(model, {"input_ids": torch.randint(0, 64, (1, 4)), "use_cache": False})
        for path in paths:
            module = model.get_submodule(path)
            twin = copy.deepcopy(module)
            call = recording.calls[module][0]
            graphs = [specialize(module, type(module).forward, call, recording, t) for t in (True, False)]
            install(module, graphs, path)
            args, kwargs = _real(call.args), _real(call.kwargs)
            empty = copy.deepcopy(twin)
            install(empty, [_doing_nothing(graph) for graph in graphs], path)
            for training in (False, True):
                for each in (module, twin, empty):
                    each.train(training)
                with torch.no_grad():
                    times = interleaved(
                        {
                            "original": lambda twin=twin, a=args, k=kwargs: twin(*a, **k),
                            "scheduled": lambda module=module, a=args, k=kwargs: module(*a, **k),
                            "dispatch": lambda empty=empty, a=args, k=kwargs: empty.forward(*a, **k),
                        },
                        rounds,
                        calls=200,
                    )
                measured = {"model": name, "module": path or "(root)", "mode": "train" if training else "eval"}
                rows.append({**measured, **{k: vars(v) for k, v in times.items()}})
            install(module, [])
    return rows


def _doing_nothing(graph: Specialization) -> Specialization:
    twin = dataclasses.replace(graph)
    vars(twin)["function"] = lambda *_: None  # replaces the function compiled on first access
    return twin


def _real(value: object) -> object:
    def leaf(described: object) -> object:
        if not isinstance(described, TensorSpec):
            return described
        if described.dtype.is_floating_point:
            return torch.randn(described.shape, dtype=described.dtype)
        return torch.zeros(described.shape, dtype=described.dtype)

    return map_structure(value, leaf)


def main() -> None:
    """Measure, print, write JSON, and exit with 1 if a dispatch takes longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dispatch.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.rounds)
    times = ("original µs", "scheduled µs", "dispatch µs")
    table = Table("model", "module", "mode", *times, title="Cost of a scheduled call")
    worst = 0.0
    for row in rows:
        cells = [f"{row[k]['median'] * 1e6:.1f}" for k in ("original", "scheduled", "dispatch")]  # type: ignore[index]
        table.add_row(*(str(row[name]) for name in ("model", "module", "mode")), *cells)
        worst = max(worst, row["dispatch"]["median"])  # type: ignore[index]
    Console().print(table)
    write_json(options.out, rows)
    if worst > LIMIT:
        raise SystemExit(f"dispatch costs {worst * 1e6:.1f} µs, more than {LIMIT * 1e6:.0f}")


if __name__ == "__main__":
    main()
