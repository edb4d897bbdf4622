"""Our matcher against torch's ``SubgraphMatcher`` on the same graphs.

    python benchmarks/matching.py --out benchmarks/results/matching.json

Two families: a pattern of seven relus on chains of relus, and the three projections of attention (three products
of one input) on GPT-2-like layers. Runs alternate between the two matchers; the table shows medians with the
spread from the first to the third quartile. "first" builds our normalized graph; "again" reuses the one cached with
the graph, as every further pattern does.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import fx
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from schedule.patterns import compile_pattern, search

RELUS = (24, 32, 40, 400, 4000)
LAYERS = (12, 24, 48, 96)


def relu_chain(length: int) -> fx.Graph:
    """Build a graph of ``length`` consecutive relus."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.relu, (value,))
    graph.output(value)
    return graph


def seven_relus(x: torch.Tensor) -> torch.Tensor:
    """Apply relu seven times (the pattern of the first family)."""
    for _ in range(7):
        x = torch.relu(x)
    return x


def attention_layers(layers: int) -> fx.Graph:
    """Build GPT-2-like layers: norm, three projections, attention, output projection, norm, MLP, two residuals."""
    graph = fx.Graph()
    x = graph.placeholder("x")

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(function, args, kwargs)

    def method(name: str, *args: Any) -> fx.Node:
        return graph.call_method(name, args)

    for i in range(layers):
        weights = {n: graph.get_attr(f"h.{i}.{n}") for n in ("ln_1", "q", "k", "v", "o", "ln_2", "fc", "proj")}
        normed = call(F.layer_norm, x, (64,), weights["ln_1"])
        heads = []
        for name in ("q", "k", "v"):
            flat = call(F.linear, normed, weights[name])
            heads.append(method("transpose", method("view", flat, 2, 16, 4, 16), 1, 2))
        scores = call(torch.matmul, heads[0], method("transpose", heads[1], -1, -2))
        weights_ = call(F.softmax, call(torch.mul, scores, 0.25), dim=-1)
        context = method("transpose", call(torch.matmul, weights_, heads[2]), 1, 2)
        x = call(torch.add, x, call(F.linear, method("reshape", context, 2, 16, 64), weights["o"]))
        normed = call(F.layer_norm, x, (64,), weights["ln_2"])
        hidden = call(F.gelu, call(F.linear, normed, weights["fc"]), approximate="tanh")
        x = call(torch.add, x, call(F.linear, hidden, weights["proj"]))
    graph.output(x)
    return graph


def projections(x: Any, q: Any, k: Any, v: Any) -> Any:
    """Compute three projections of one input (the pattern of the second family)."""
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Run the function with garbage collection disabled, and return the milliseconds and the result."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    result = run()
    elapsed = (time.perf_counter() - start) * 1e3
    gc.enable()
    return elapsed, result


def summary(times: list[float]) -> dict[str, float]:
    """Return the median and the quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median_ms": middle, "q1_ms": low, "q3_ms": high}


def measure(make: Callable[[int], fx.Graph], pattern: Any, size: int, repeats: int) -> dict[str, Any]:
    """Return one row: times of both matchers, run alternately on fresh graphs of ``size``."""
    ours = compile_pattern(pattern)
    theirs = SubgraphMatcher(fx.symbolic_trace(pattern).graph)
    times: dict[str, list[float]] = {"first": [], "again": [], "torch": []}
    found: dict[str, int] = {}
    visited = 0
    for _ in range(repeats):
        graph, twin = make(size), make(size)
        elapsed, result = timed(lambda graph=graph: search(graph, ours))  # type: ignore[misc]
        times["first"].append(elapsed)
        elapsed, result = timed(lambda graph=graph: search(graph, ours))  # type: ignore[misc]
        times["again"].append(elapsed)
        found["ours"], visited = len(result.graph_matches), result.visited
        elapsed, result = timed(lambda twin=twin: theirs.match(twin))  # type: ignore[misc]
        times["torch"].append(elapsed)
        found["torch"] = len(result)
    row: dict[str, Any] = {name: summary(values) for name, values in times.items()}
    nodes = len(make(size).nodes)
    speedup = row["torch"]["median_ms"] / row["first"]["median_ms"]
    return row | {"size": size, "nodes": nodes, "visited": visited, "found": found, "speedup": speedup}


def show(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Print the table."""
    table = Table("graph", "nodes", "first ms", "again ms", "torch ms", "ahead", "visited", "found (torch)")

    def cell(row: dict[str, Any], name: str) -> str:
        s = row[name]
        return f"{s['median_ms']:.2f} ({s['q1_ms']:.2f}–{s['q3_ms']:.2f})"

    for family, entries in rows.items():
        for row in entries:
            table.add_row(
                f"{family} {row['size']}",
                str(row["nodes"]),
                *(cell(row, name) for name in ("first", "again", "torch")),
                f"{row['speedup']:.1f}×",
                str(row["visited"]),
                f"{row['found']['ours']} ({row['found']['torch']})",
            )
    Console(width=120).print(table)


def main() -> None:
    """Measure both families, print the table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/matching.json"))
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    rows = {
        "relu chain": [measure(relu_chain, seven_relus, n, given.repeats) for n in RELUS],
        "qkv, layers": [measure(attention_layers, projections, n, given.repeats) for n in LAYERS],
    }
    show(rows)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"torch": torch.__version__, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
