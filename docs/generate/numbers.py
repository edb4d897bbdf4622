"""The page of numbers: tables of what the scripts under ``benchmarks/`` have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from docs.generate.docstrings import as_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_MB, _MIB = 1e6, 2**20
Rows = Iterator[list[str]]


def results(name: str) -> Any:
    """Return what a script wrote, without the versions and the machine."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return found.get("results", found)


def lines(name: str) -> list[dict[str, Any]]:
    """Return the lines that a script wrote on a card."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def number_reference() -> str:
    """A heading and a table for each script, with where and when it ran."""
    return "\n\n".join(_section(*each) for each in SECTIONS)


def _section(title: str, script: str, about: str, head: Sequence[str], rows: Callable[[], Rows]) -> str:
    table = "\n".join(as_table([list(head), *rows()]))
    return f"## {title}\n\n{about} Written by `python -m benchmarks.{script}`.\n\n{table}"


def _of(value: float, base: float) -> str:
    return f"{value / base:.2f}"


# -- whole models --------------------------------------------------------------------------------------------


def _bytes(figure: str) -> Rows:
    for line in results("kept_cpu"):
        eager = line["eager"][figure]
        others = [_of(line[name][figure], eager) for name in ("torch.compile", "default", "memory", "all")]
        yield [line["model"], line["attention"], line["dtype"], f"{eager / _MB:.0f}", *others]


def _models_on_a_card() -> Rows:
    items = {each["item"]: each for each in lines("gpu_models_h100") if each["kind"] == "item"}
    found = {each["item"]: each for each in lines("gpu_models_h100") if each["kind"] == "result" and "us" in each}
    for name, item in items.items():
        if name.startswith(("warm", "start")):
            continue
        model, precision, candidate = name.split(" ", 2)
        line = found.get(name)
        if line is None:
            why = "failed" if item["status"] == "failed" else "not measured"
            yield [model, precision, candidate, why, "–", "–"]
        else:
            step, peak = f"{line['us'][0] / 1e3:.1f}", f"{line['peak'] / 1e9:.1f}"
            yield [model, precision, candidate, step, peak, f"{line['first_s']:.1f}"]


def _models_on_a_cpu() -> Rows:
    found = results("end_to_end_gpt2_cpu")
    base = found[0]
    for line in found:
        times = [_of(line[name]["median"], base[name]["median"]) for name in ("step", "forward")]
        peak = _of(line["peak"], base["peak"])
        firsts = [f"{line[name]:.1f}" for name in ("first", "first_deeper", "first_cold")]
        yield [line["candidate"], *times, peak, *firsts]


def _models_of_other_libraries() -> Rows:
    for model, candidates in results("beyond").items():
        base = candidates["original"]
        for candidate, found in candidates.items():
            cells = [f"{found['kept'] / _MIB:.0f}"]
            for column in ("step", "evaluation"):
                both = column in found
                cells.append(f"{found[column]['ratios'][0]:.2f}" if both else "–")
                operations = f"{column}, operations"
                cells.append(_of(found[operations], base[operations]) if both else "–")
            yield [model, candidate, *cells]


def _losses() -> Rows:
    hosts = {"first": "", "second": "_other_host", "third": "_third_run"}
    for host, name in hosts.items():
        found = results(f"preference{name}")
        for loss, one in (("DPO", found), ("distillation", found["distillation"])):
            base = one["full logits"]
            for way in ("full logits", "torch.compile", "fused"):
                step = _of(one[way]["step"]["median"], base["step"]["median"])
                yield [loss, host, way, step, f"{one[way]['peak'] / _MIB:.0f}"]


# -- ops -----------------------------------------------------------------------------------------------------


def _ops_on_a_card() -> Rows:
    found: dict[str, dict[str, Any]] = {}
    for line in lines("gpu_ops_h100"):
        if line.get("op"):
            found.setdefault(line["op"], {})[line["work"]] = line["us"]
    for op, times in found.items():
        if not {"forward", "backward", "both"} <= times.keys():
            continue
        copies = [_of(times[work]["copy"][0], times[work]["ours"][0]) for work in ("forward", "backward")]
        both = times["both"]
        others = [
            _of(both["ours"][0], both[way][0]) if way in both else "–" for way in ("eager", "torch.compile", "Liger")
        ]
        yield [op, *copies, *others]


def _ops_on_a_cpu() -> Rows:
    latest: dict[tuple[str, str, str], tuple[str, str]] = {}
    for run in ("large", "more_rounds", "medium", "linear", "bfloat16", "losses", "star_relu"):
        for line in results(f"ops_cpu_{run}")["lines"]:
            if line["work"] == "forward + backward":
                times = {way: each["median"] for way, each in line["times"].items()}
                host = " on another host" if run == "linear" else ""
                beside = _of(times["ours"], times["eager"]), _of(times["ours"], times["torch.compile"])
                latest[line["op"] + host, line["size"], line["dtype"]] = beside
    for key in sorted(latest):
        yield [*key, *latest[key]]


# -- the compiler itself -------------------------------------------------------------------------------------


def _scheduling() -> Rows:
    for line in results("compile_time"):
        yield [line["model"], str(line["layers"]), f"{line['ours']:.1f}", f"{line['export']:.1f}"]


def _dispatch() -> Rows:
    for line in results("dispatch"):
        microseconds = f"{line['dispatch']['median'] * 1e6:.1f}"
        yield [line["model"], line["module"] or "the root", line["mode"], microseconds]


def _matching() -> Rows:
    for graph in ("relu chain", "qkv, layers"):
        for line in results("matching")[graph]:
            yield [graph, str(line["size"]), str(line["nodes"]), str(line["visited"]), f"{line['speedup']:.1f}"]


def _startup() -> Rows:
    for name, time in results("startup").items():
        yield [name, f"{time['median']:.2f}"]


# -- the page ------------------------------------------------------------------------------------------------


_CPU = "On two cores of a shared machine; only ratios mean anything."
_SMALL = (
    "Four layers at full width, batch 4 × 256, no dropout. Eager torch in MB, the others over eager. SDPA is "
    "transformers' default. The same in each run."
)
_BYTES = ("model", "attention", "dtype", "eager, MB", "`torch.compile`", '`"default"`', '`"memory"`', '`"all"`')
_CARD = "On one H100 (80 GB) with torch 2.11, Triton 3.6 and bfloat16, 28 November 2026."
SECTIONS: tuple[tuple[str, str, str, Sequence[str], Callable[[], Rows]], ...] = (
    (
        "Memory kept for the backward pass",
        "kept",
        f'{_SMALL} What is allocated in the forward pass and not yet free when it ends. With `"memory"` it has the '
        "gradient of the head in it (154 MB for GPT-2 and Llama), which the others allocate in the backward pass.",
        _BYTES,
        partial(_bytes, "kept"),
    ),
    (
        "Peak memory of a training step",
        "kept",
        f"{_SMALL} The most in use in the forward and the backward pass, gradients included, weights not.",
        _BYTES,
        partial(_bytes, "peak"),
    ),
    (
        "A training step on an H100",
        "gpu --part C",
        f"{_CARD} Llama: 1.2 billion parameters, 16 layers, vocabulary 128,256, 4 × 2,048 tokens, AdamW. GPT-2 ended "
        "with an error of CUDA while it was scheduled: mended since, not run there again.",
        ("model", "precision", "candidate", "step, ms", "peak, GB", "first step, s"),
        _models_on_a_card,
    ),
    (
        "Ops on an H100",
        "gpu --part B",
        f"{_CARD} At least 500 MB move. The time of a copy of the same bytes over ours (1.00 is the most there is), "
        "then forward + backward over the others.",
        ("op", "copy, forward", "copy, backward", "over eager", "over `torch.compile`", "over Liger 0.8.5"),
        _ops_on_a_card,
    ),
    (
        "A training step on a CPU",
        "end_to_end --only gpt2",
        f"{_CPU} GPT-2 of four layers on an AMD EPYC, eager attention, float32, batch 4 × 256. Half of the gain are "
        "products by oneDNN there, which other processors do not have. First steps are of a new process.",
        (
            *("candidate", "step over eager", "forward over eager", "peak over eager"),
            *("first step again, s", "first step of another depth, s", "first step ever, s"),
        ),
        _models_on_a_cpu,
    ),
    (
        "Models of other libraries on a CPU",
        "beyond",
        f"{_CPU} Random weights, one thread. Kept for the backward pass in MiB; times over eager, of whole calls and "
        "of the sum of all operations.",
        (
            *("model", "candidate", "kept, MiB", "step", "step, operations", "evaluation"),
            "evaluation, operations",
        ),
        _models_of_other_libraries,
    ),
    (
        "Losses without logits on a CPU",
        "preference",
        f"{_CPU} A vocabulary of 32,000, two pairs of 256 tokens; the logits alone are 125 MiB.",
        ("loss", "run", "way", "step over full logits", "peak, MiB"),
        _losses,
    ),
    (
        "Ops on a CPU",
        "ops",
        f"{_CPU} Forward + backward. Medium is [4096, 3072], large [8192, 11008].",
        ("op", "size", "dtype", "over eager", "over `torch.compile`"),
        _ops_on_a_cpu,
    ),
    (
        "Scheduling",
        "compile_time",
        f"{_CPU} Models on the meta device, beside `torch.export` of them.",
        ("model", "layers", "scheduling, s", "`torch.export`, s"),
        _scheduling,
    ),
    (
        "A call of a scheduled module",
        "dispatch",
        f"{_CPU} What choosing the graph and checking its guards adds to a call.",
        ("model", "module", "mode", "added, µs"),
        _dispatch,
    ),
    (
        "Matching",
        "matching",
        f"{_CPU} Beside torch's `SubgraphMatcher`.",
        ("graph", "size", "nodes", "visited", "times as fast"),
        _matching,
    ),
    ("Starting", "startup", f"{_CPU} Of a new process.", ("what", "seconds"), _startup),
)
