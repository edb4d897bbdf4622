"""Instructions, registers and width of loads of each Triton kernel, compiled for sm_90 on any machine.

``python -m benchmarks.sass`` compiles the kernels of every case, disassembles them with the nvdisasm of Triton's wheel,
prints a table and writes JSON. ``--before FILE`` prints old → new; ``--read FILE`` reads results instead of compiling.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Triton reads this when it is imported.
os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton import knobs

import fused
from benchmarks.disassembly import Code, disassembled
from benchmarks.timing import write_json
from fused.bias_dropout import BIAS_DROPOUT
from fused.philox import DropoutStream
from tests.fused.triton import hopper

Tensor = torch.Tensor

RESULTS = Path("benchmarks/results/sass_sm90.json")
ROWS = 64  # instructions do not depend on it, except that it is divisible by 16


def _bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()


def _backward(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def _activation(name: str) -> None:
    _backward(fused.bias_activation(_bf16(ROWS, 4096), _bf16(4096), name))


def _dropout_add() -> None:
    _backward(fused.bias_dropout_add(_bf16(ROWS, 4096), _bf16(4096), _bf16(ROWS, 4096), 0.1))


def _drawn_dropout() -> None:
    """Run the op with the numbers of a CUDA generator."""
    keep, x = DropoutStream(seed=2**40, first=2**40, threads=2**18, vector=8, threshold=2**31), _bf16(ROWS, 4096)
    with torch.no_grad():
        BIAS_DROPOUT.run("forward", (x, x[0], x, keep, 2.0), "triton")
        BIAS_DROPOUT.run("backward", (x, keep, 2.0), "triton", x_dtype=x.dtype, bias_dtype=x.dtype)


def _rotary(interleaved: bool) -> None:
    # As in a model: heads transposed after a projection, cos and sin of each position for all heads.
    q, k = (_bf16(2, ROWS, heads, 128).transpose(1, 2) for heads in (32, 8))
    cos, sin = (torch.zeros(1, ROWS, 128, dtype=torch.bfloat16) for _ in range(2))
    _backward(*fused.rotary_embedding(q, k, cos, sin, interleaved=interleaved))


def _softmax(keys: int, **settings: Any) -> None:
    _backward(fused.scaled_masked_softmax(_bf16(1, 2, ROWS, keys), scale=0.125, **settings))


def _cross_entropy(classes: int, **settings: Any) -> None:
    targets = torch.zeros(ROWS, dtype=torch.int64)
    _backward(fused.cross_entropy(_bf16(ROWS, classes), targets, **settings))


def _rms_norm(columns: int) -> None:
    _backward(fused.rms_norm(_bf16(ROWS, columns), _bf16(columns)))


def _layer_norm(columns: int) -> None:
    _backward(fused.layer_norm(_bf16(ROWS, columns), _bf16(columns), _bf16(columns)))


def _mask(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


CASES: dict[str, Callable[[], None]] = {
    "bias + gelu": lambda: _activation("gelu"),
    "bias + gelu_tanh": lambda: _activation("gelu_tanh"),
    "bias + silu": lambda: _activation("silu"),
    "swiglu": lambda: _backward(fused.swiglu(_bf16(ROWS, 8192))),
    "bias + swiglu": lambda: _backward(fused.bias_swiglu(_bf16(ROWS, 8192), _bf16(8192))),
    "weighted relu²": lambda: _backward(fused.weighted_squared_relu(_bf16(ROWS, 4096), _bf16(ROWS, 1))),
    "bias + dropout + add": _dropout_add,
    "bias + drawn dropout + add": _drawn_dropout,
    "rms_norm 4096": lambda: _rms_norm(4096),
    "rms_norm 16384": lambda: _rms_norm(16384),
    "layer_norm 1024": lambda: _layer_norm(1024),
    "layer_norm 4096": lambda: _layer_norm(4096),
    "layer_norm 8192": lambda: _layer_norm(8192),
    "layer_norm 16384": lambda: _layer_norm(16384),
    "add + rms_norm 4096": lambda: _backward(
        *fused.add_rms_norm(_bf16(ROWS, 4096), _bf16(ROWS, 4096), _bf16(4096)),
    ),
    "rotary": lambda: _rotary(False),
    "rotary interleaved": lambda: _rotary(True),
    "causal softmax 1024": lambda: _softmax(1024, causal=True),
    "causal softmax 1000": lambda: _softmax(1000, causal=True),
    "bool-masked softmax 1024": lambda: _softmax(1024, mask=_mask(1, 1, ROWS, 1024)),
    "mask-added softmax 1024": lambda: _softmax(1024, mask=_bf16(1, 1, ROWS, 1024).detach()),
    "cross entropy 128256": lambda: _cross_entropy(128256),
    "cross entropy 128256, softcap": lambda: _cross_entropy(128256, softcap=30.0),
    "cross entropy 50257": lambda: _cross_entropy(50257),
    "cross entropy 50264": lambda: _cross_entropy(50264),
}


def compiled(case: Callable[[], None]) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Return name, metadata and cubin of each kernel that only this case launches, in its first configuration."""
    found: dict[str, tuple[dict[str, Any], Path]] = {}

    def listener(metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        cubin = next(path for name, path in metadata_group.items() if name.endswith(".cubin"))
        found.setdefault(metadata["name"], (metadata, Path(cubin)))

    knobs.compilation.listener = listener
    with fused.backend("triton"):
        case()
    for name, (metadata, cubin) in found.items():
        yield name, metadata, cubin


def figures(code: Code, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one kernel, of its whole code and of each of its loops."""
    return {
        "warps": metadata["num_warps"],
        "registers": code.registers,
        "shared": metadata["shared"],
        **_counted(code.instructions),
        "loops": [_counted(loop) for loop in code.loops()],
    }


def _counted(instructions: list[str]) -> dict[str, Any]:
    """Count instructions of a kind; loads and stores by width in bits."""
    kinds = Counter(name.partition(".")[0] for name in instructions)
    return {
        "instructions": len(instructions),
        "mufu": kinds["MUFU"],
        "spills": kinds["LDL"] + kinds["STL"],
        "loads": _widths(instructions, ("LDG", "LDGSTS")),
        "stores": _widths(instructions, ("STG",)),
        "barriers": kinds["BAR"],
        "shuffles": kinds["SHFL"],
        "calls": kinds["CALL"],
    }


def _widths(instructions: list[str], kinds: tuple[str, ...]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name in instructions:
        kind, *modifiers = name.split(".")
        if kind in kinds:
            counts[next((m.lstrip("US") for m in modifiers if m.lstrip("US") in ("8", "16", "64", "128")), "32")] += 1
    return dict(sorted(counts.items(), key=lambda pair: int(pair[0])))


def measure(only: str) -> dict[str, dict[str, Any]]:
    """Return the figures of the kernels of the cases with `only` in their name."""
    hopper.install()
    results = {}
    for name, case in CASES.items():
        if only in name:
            for kernel, metadata, cubin in compiled(case):
                results[f"{name}: {kernel.strip('_')}"] = figures(disassembled(cubin), metadata)
    return results


def show(results: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> None:
    """Print the figures, as old → new where they changed."""
    table = Table("kernel", "instructions", "in loops", "registers", "spills", "shared", "MUFU", "loads", "stores")
    for name, new in results.items():
        old = before.get(name, new)
        table.add_row(name, *(_change(column(old), column(new)) for column in _COLUMNS))
    Console(width=190).print(table)


def _change(old: str, new: str) -> str:
    return new if old == new else f"{old or 0} → {new or 0}"


def _by_width(counts: dict[str, int]) -> str:
    return " ".join(f"{count}×{width}" for width, count in counts.items())


_COLUMNS: tuple[Callable[[dict[str, Any]], str], ...] = (
    lambda row: str(row["instructions"]),
    lambda row: " ".join(str(loop["instructions"]) for loop in row["loops"]),
    lambda row: str(row["registers"]),
    lambda row: str(row["spills"]),
    lambda row: str(row["shared"]),
    lambda row: str(row["mufu"]),
    lambda row: _by_width(row["loads"]),
    lambda row: _by_width(row["stores"]),
)


def main() -> None:
    """Compile or read, print, and write what was compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the cases to compile")
    parser.add_argument("--before", type=Path, help="results to compare with")
    parser.add_argument("--read", type=Path, help="results to show instead of compiling")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    before = _read(options.before) if options.before else {}
    if options.read:
        show(_read(options.read), before)
        return
    results = measure(options.only)
    show(results, before)
    if not options.only or options.out != RESULTS:
        write_json(options.out, {"triton": triton.__version__, "kernels": results})


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]["kernels"]
    return found


if __name__ == "__main__":
    main()
