"""Part B: each op beside eager, torch.compile and Liger-Kernel, at sizes bound by memory and by launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fused
from benchmarks.gpu.clock import Clock, Ready, microseconds, peak_above, relative_error
from benchmarks.gpu.log import Log
from benchmarks.gpu.queue import Item
from benchmarks.op_table import TABLE, Function, Row, Tensor, nbytes
from benchmarks.ops import as_tuple, leaves
from benchmarks.rules import CONSTRUCTS, compare

OPS = {row.name: row for row in sorted(TABLE, key=lambda row: row.liger is None) if row.name != "linear"}
"""The ops, those first that Liger-Kernel has too."""
WAVE = 10
"""How many ops are compiled side by side before they are timed, so a budget that runs out leaves whole lines."""
WARMED = ("ours", "torch.compile", "Liger")
SETS = 3
PASSES = ("forward", "backward", "both")


def items(device: str) -> list[Item]:
    """Return the items: the copy, a warm-up of every candidate side by side, the ops, the thresholds."""
    found = [Item("copy", copy_ceiling, (device,), 0, 60, alone=True)]
    names = [name for name in WARMED if name != "Liger" or any(row.peers(device) for row in OPS.values())]
    for place, (size, (op, row)) in enumerate(itertools.product(sizes(device), OPS.items())):
        first, one = 1 + 2 * (place // WAVE), f"{op} {size}"
        warmed = [name for name in names if name != "Liger" or "Liger" in row.peers(device)]
        found += [Item(f"warm {one}: {name}", warm_up, (op, size, name, device), first, 120, 10) for name in warmed]
        found.append(Item(one, time_op, (op, size, device), first + 1, 60, 8, alone=True))
    found += [Item(f"threshold {kind}", threshold, (kind, device), 99, 30, alone=True) for kind in CONSTRUCTS]
    return found


def sizes(device: str) -> tuple[str, ...]:
    return ("card", "small") if device == "cuda" else ("tiny",)


def copy_ceiling(log: Log, device: str) -> None:
    """Measure the bandwidth of a copy, counting bytes read and written."""
    clock = Clock(device)
    for size in (2**28, 2**30, 2**32) if device == "cuda" else (2**20,):
        source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        run = {"copy": lambda _, t=target, s=source: lambda: t.copy_(s)}
        timing = clock.interleaved(run, 20)["copy"]
        log.result(measure="copy", bytes=2 * size, us=microseconds(timing), gb_s=round(2 * size / timing.median / 1e9))


def candidates(row: Row, device: str) -> dict[str, Function]:
    """Return the functions to compare; on the CPU, torch.compile without its compiler and our kernels interpreted."""
    backend = "inductor" if device == "cuda" else "eager"
    if device != "cuda":
        fused.backend("triton")
    compiled = torch.compile(row.eager, backend=backend, dynamic=False)
    return {"eager": row.eager, "ours": row.ours, "torch.compile": compiled, **row.peers(device)}


def warm_up(log: Log, op: str, size: str, name: str, device: str) -> None:
    """Run one candidate once, so that its kernels are in the caches on disk, or it fails alone."""
    row = OPS[op]
    sets = [leaves(row, size, torch.bfloat16, device)]
    for work in PASSES:
        ready(candidates(row, device)[name], sets, incoming(row, sets[0]), work)(0)()


def incoming(row: Row, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Make gradients of the results."""
    with torch.no_grad():
        return [torch.randn_like(out) if out.ndim else torch.ones_like(out) for out in as_tuple(row.eager(*inputs))]


def ready(function: Function, sets: Sequence[Sequence[Tensor]], grads: Sequence[Tensor], work: str) -> Ready:
    """Return what prepares one pass for a round: a forward pass without gradients, a backward pass, or both."""

    def wanted(inputs: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor in inputs if tensor.requires_grad]

    def forward(number: int) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return function(*sets[number % len(sets)])

        return call

    def backward(number: int) -> Callable[[], Any]:
        inputs = sets[number % len(sets)]
        outs = as_tuple(function(*inputs))
        given = [g.to(out.dtype) for g, out in zip(grads, outs, strict=True)]
        return lambda: torch.autograd.grad(outs, wanted(inputs), given)

    def both(number: int) -> Callable[[], Any]:
        inputs = sets[number % len(sets)]
        return lambda: torch.autograd.grad(as_tuple(function(*inputs)), wanted(inputs), grads)

    return {"forward": forward, "backward": backward, "both": both}[work]


def time_op(log: Log, op: str, size: str, device: str) -> None:
    """Measure an op at a size: times, bytes that must move, peak, and errors against float64 inputs."""
    row = OPS[op]
    failed = {record["item"] for record in log.read() if record["kind"] == "item" and record["status"] != "done"}
    sets = [leaves(row, size, torch.bfloat16, device, seed) for seed in range(SETS)]
    grads = incoming(row, sets[0])
    runs = {name: run for name, run in candidates(row, device).items() if f"warm {op} {size}: {name}" not in failed}
    # Some of Liger's ops write over their inputs.
    own = {"Liger": [_copies(inputs) for inputs in sets]} if "Liger" in runs else {}
    given = {name: own.get(name, sets) for name in runs}
    errors = {} if row.random else _errors(row, runs, grads, size, device)
    clock = Clock(device)
    for work in ("both",) if size == "small" else PASSES if row.memory_bound else ("both",):
        passes = {name: ready(run, given[name], grads, work) for name, run in runs.items()}
        moved = must_move(row, sets[0], grads, work)
        if size == "small":
            times = clock.back_to_back(passes, 15, 50)
        else:
            times = clock.interleaved({**passes, "copy": _copy(moved, device)}, 30 if device == "cuda" else 2)
        log.result(
            op=op,
            size=size,
            work=work,
            bytes=moved,
            us={name: microseconds(timing) for name, timing in times.items()},
            peak={name: peak_above(one(0), device) for name, one in passes.items()} if work == "both" else {},
            errors=errors if work == "both" else {},
        )


def must_move(row: Row, inputs: Sequence[Tensor], outs: Sequence[Tensor], work: str) -> int:
    """Return the bytes to read and write: inputs and results; saved tensors, gradients in and out."""
    forward = nbytes(*inputs, *outs)
    backward = row.saved(*inputs) + nbytes(*outs, *(tensor for tensor in inputs if tensor.requires_grad))
    return {"forward": forward, "backward": backward, "both": forward + backward}[work]


def _copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]


def _copy(moved: int, device: str) -> Ready:
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda _: lambda: target.copy_(source)


def _errors(row: Row, runs: dict[str, Function], grads: Sequence[Tensor], size: str, device: str) -> dict[str, float]:
    """Return each candidate's largest relative error, of results and gradients, against eager in float64."""
    inputs = leaves(row, size, torch.bfloat16, device)

    def results(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
        outs = as_tuple(function(*given))
        back = [g.to(out.dtype) for g, out in zip(grads, outs, strict=True)]
        return [*outs, *torch.autograd.grad(outs, [one for one in given if one.requires_grad], back)]

    wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
    exact = results(row.eager, wide)
    return {name: float(f"{relative_error(results(run, _copies(inputs)), exact):.2e}") for name, run in runs.items()}


def threshold(log: Log, kind: str, device: str) -> None:
    """Measure our time over eager's for a construct of the rules, by the number of elements."""
    powers = range(14, 25, 2) if device == "cuda" else (14,)
    ratios = {}
    for power in powers:
        eager, ours = compare(kind, 2**power, device, 9 if device == "cuda" else 1)
        ratios[power] = round(ours / eager, 3)
    log.result(threshold=kind, ratios=ratios)
