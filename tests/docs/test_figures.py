"""The figures of README and docs/compare.md are those of the JSON files under benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPS = {"`swiglu` (packed)": "swiglu packed", "`linear`, 1024 × 768 → 3072, fp32 on two hosts": "linear"}
"""Ops that a row names otherwise than the benchmark."""


def results(name: str) -> Any:
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found.get("results", found)


def row(beginning: str) -> list[str]:
    """Return the cells of the README's row that begins so, after the first."""
    line = next(line for line in README.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("| ").split(" | ")[1:]]


def op_ratios() -> dict[tuple[str, str], str]:
    """Return (op, size or 16-bit dtype) → time over eager's and torch.compile's, from the latest run with most rounds.

    Those of `linear` in float32 are ranges over two hosts.
    """
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    runs = ("large", "more_rounds", "medium", "linear", "bfloat16", "losses", "star_relu")
    for name in (f"ops_cpu_{run}" for run in runs):
        for line in results(name)["lines"]:
            times = {way: each["median"] for way, each in line["times"].items()}
            if line["work"] == "forward + backward":
                key = line["op"], line["size"] if line["dtype"] == "float32" else line["dtype"]
                other_host = found[key] if name == "ops_cpu_linear" else []
                found[key] = [*other_host, (times["ours"] / times["eager"], times["ours"] / times["torch.compile"])]
    return {key: " / ".join(map(_range, zip(*ratios, strict=True))) for key, ratios in found.items()}


def _range(values: Sequence[float]) -> str:
    return "–".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def op_rows() -> list[str]:
    table = README.partition("| op | medium | large | medium, bf16 |\n|---|---|---|---|\n")[2].partition("\n\n")[0]
    return [line.strip("| ") for line in table.splitlines()]


@pytest.mark.parametrize("line", op_rows())
def test_ops(line: str) -> None:
    name, medium, large, bf16 = line.split(" | ")
    op = OPS.get(name, name.replace("`", ""))
    ratios = op_ratios()
    assert medium == ratios[op, "medium"]
    assert large == ratios.get((op, "large"), "–")
    assert bf16 == ratios[op, "bfloat16"]


@pytest.mark.parametrize("name", ["DPO step on a vocabulary of 32,000", "distillation step"])
def test_losses_of_hidden_states(name: str) -> None:
    runs = [results(f"preference{host}") for host in ("", "_other_host", "_third_run")]
    runs = [run["distillation"] if name.startswith("distillation") else run for run in runs]
    ours, compiled = (
        _range([run[way]["step"]["median"] / run["full logits"]["step"]["median"] for run in runs])
        for way in ("fused", "torch.compile")
    )
    run = runs[0]
    sizes = [*(run[way]["peak"] for way in ("fused", "full logits", "torch.compile")), run["logits"]]
    peaks = [f"{size / 2**20:.0f}" for size in sizes]
    (cell,) = row(name)
    beginning = f"{ours} × the time (`torch.compile` {compiled}) and a peak of {peaks[0]} MiB against {peaks[1]}"
    assert cell.removesuffix(" of each model") == (
        f"{beginning} (`torch.compile` {peaks[2]}); the logits alone are {peaks[3]}"
    )


@pytest.mark.parametrize("name", results("beyond"))
def test_models_of_other_libraries(name: str) -> None:
    found = results("beyond")[name]
    kept = " / ".join(f"{each['kept'] / 2**20:.0f}" for each in found.values())
    cells = [kept, *(_ratios(found, column) for column in ("step", "evaluation"))]
    assert row(f"`{name}`") == cells


def _ratios(found: dict[str, Any], column: str) -> str:
    """Return the times of whole calls over that of the first candidate, then those of the operations, or a dash."""
    first, *others = [each for each in found.values() if column in each] or [{}]
    whole = " / ".join(f"{each[column]['ratios'][0]:.2f}" for each in others)
    operations = f"{column}, operations"
    summed = " / ".join(f"{each[operations] / first[operations]:.2f}" for each in others)
    return f"{whole}; {summed}" if others else "–"


def test_dispatch() -> None:
    times = [each["dispatch"]["median"] * 1e6 for each in results("dispatch")]
    assert row("dispatch of a scheduled module")[0].startswith(f"{min(times):.1f}–{max(times):.1f} µs")


def test_matching() -> None:
    found = results("matching")
    chains, layers = ([each["speedup"] for each in found[name]] for name in ("relu chain", "qkv, layers"))
    assert row("matcher against")[0].startswith(f"{min(chains):.1f}–{max(chains):.1f} ×")
    assert row("matcher, QKV")[0].startswith(f"{min(layers):.0f}–{max(layers):.0f} ×")
    visited = [each["visited"] for each in found["qkv, layers"]]
    assert visited[-1] == 8 * visited[0]


@pytest.mark.parametrize("name, model", [("a 96-layer GPT-2", "gpt2"), ("a 70B-shaped Llama", "llama 70B")])
def test_scheduling(name: str, model: str) -> None:
    found = [each for each in results("compile_time") if each["model"] == model]
    deepest = max(found, key=lambda each: each["layers"])
    (cell,) = row(f"scheduling {name}")
    assert cell.startswith(f"{deepest['ours']:.1f} s against {deepest['export']:.1f} s")


def test_whole_models() -> None:
    lines = {each["candidate"]: each for each in results("end_to_end_gpt2_cpu")}
    step = {name: f"{each['step']['median'] / lines['original']['step']['median']:.2f}" for name, each in lines.items()}
    (cell,) = row("training step of GPT-2")
    assert f'{step["ours"]}, with `rules="all"` {step["ours, all"]}; ' in cell
    assert f"`torch.compile` {step['torch.compile']}, both {step['ours + compile']}." in cell
    assert cell.startswith(f"{step['ours']}–"), "a range over hosts and runs, of which this is the least"
    saved = {name: lines[name]["saved"] for name in ("original", "ours", "ours, all")}
    eager, default, _, everything = row("GPT-2")
    assert eager == f"{saved['original'] / 1e6:.0f} MB"
    for cell, name in ((default, "ours"), (everything, "ours, all")):
        assert cell == f"{saved[name] / 1e6:.0f} MB ({saved[name] / saved['original']:.2f})"


def test_the_comparison_says_what_readme_says() -> None:
    page = " ".join((ROOT / "docs" / "compare.md").read_text(encoding="utf-8").split())
    (cell,) = row("training step of GPT-2")
    ours, compiled = re.findall(r"\d\.\d\d–\d\.\d\d", cell)
    assert f"{ours} scheduled and {compiled} compiled" in page


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("op", ["swiglu of two tensors", "rms_norm", "layer_norm", "rotary_embedding", "cross_entropy"])
def test_ops_on_a_gpu(op: str) -> None:
    name, _, rest = op.partition(" ")
    times = {line["work"]: line["us"] for line in lines_of("gpu_ops_h100") if line.get("op") == op}
    copy = " / ".join(f"{times[work]['copy'][0] / times[work]['ours'][0]:.2f}" for work in ("forward", "backward"))
    both = times["both"]
    others = [f"{both['ours'][0] / both[other][0]:.2f}" for other in ("eager", "torch.compile", "Liger")]
    assert row(f"`{name}` {rest} on a GPU".replace("  ", " ")) == [copy, *others]


def test_models_on_a_gpu() -> None:
    text = " ".join(README.split())
    found = {line["candidate"]: line for line in lines_of("gpu_models_h100") if line.get("model") == "llama"}
    for candidate, shown in (("HF sdpa", "SDPA"), ("ours", "ours"), ("ours, all", '`"all"`'), ("torch.compile",) * 2):
        line = found[candidate]
        figures = f"{line['us'][0] / 1e3:.1f} ms, {line['peak'] / 1e9:.1f} GB"
        assert f"{shown.replace('torch.compile', '`torch.compile`')} {figures}" in text
