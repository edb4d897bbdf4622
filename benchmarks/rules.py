"""From which size on a rewrite pays: ``python -m benchmarks.rules``.

Training steps (forward and backward) of each construct alone, eager against fused, at growing sizes, interleaved.
``schedule/rules/thresholds.py`` says what was made of the numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import fused

HIDDEN = 256
KEYS = 64


def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GPT-2's MLP up to its activation."""
    z = F.linear(x, weight, bias)
    return 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * torch.pow(z, 3.0))))


def attention(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Eager attention between its two products."""
    return F.dropout(F.softmax(x * 0.125 + mask, dim=-1), p)


CONSTRUCTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "formula": (formula, lambda x, w, bias: fused.bias_activation(F.linear(x, w), bias, "gelu_tanh")),
    "single": (
        lambda x, w, bias: F.gelu(F.linear(x, w, bias)),
        lambda x, w, bias: fused.bias_activation(F.linear(x, w), bias, "gelu"),
    ),
    "softmax": (
        lambda x, mask: attention(x, mask, 0.0),
        lambda x, mask: fused.scaled_masked_softmax(x, mask, 0.125),
    ),
    "softmax, dropout": (
        lambda x, mask: attention(x, mask, 0.1),
        lambda x, mask: fused.scaled_masked_softmax(x, mask, 0.125, dropout_p=0.1),
    ),
}


def inputs(kind: str, elements: int, device: str) -> tuple[Tensor, ...]:
    """The tensor that counts, and weight and bias, or mask."""
    if kind.startswith("softmax"):
        x = torch.randn(1, max(elements // KEYS**2, 1), KEYS, KEYS, device=device, requires_grad=True)
        return x, torch.zeros(1, 1, KEYS, KEYS, device=device)
    x = torch.randn(elements // HIDDEN, HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(HIDDEN, HIDDEN, device=device) / HIDDEN**0.5
    return x, weight, torch.randn(HIDDEN, device=device, requires_grad=True)


def seconds(function: Callable[..., Tensor], given: tuple[Tensor, ...], repeats: int) -> float:
    """Of one forward and backward."""
    start = time.perf_counter()
    for _ in range(repeats):
        function(*given).sum().backward()
    if given[0].is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def compare(kind: str, elements: int, device: str, rounds: int) -> tuple[float, float]:
    """Median seconds of eager and of fused, measured in turns."""
    eager, ours = CONSTRUCTS[kind]
    given = inputs(kind, elements, device)
    repeats = max(1, min(200, 2**22 // elements))
    for function in (eager, ours):
        seconds(function, given, 3)
    pairs = [(seconds(eager, given, repeats), seconds(ours, given, repeats)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    sizes = [2**power for power in range(14, 24)]
    table = Table(title=f"eager / fused (ratio), µs a step on {options.device}, {torch.get_num_threads()} threads")
    for name in ("elements", *CONSTRUCTS):
        table.add_column(name, justify="right")
    for size in track(sizes, "measuring", console=Console(stderr=True)):
        cells = []
        for kind in CONSTRUCTS:
            eager, ours = compare(kind, size, options.device, options.rounds)
            cells.append(f"{eager * 1e6:,.0f} / {ours * 1e6:,.0f} ({ours / eager:.2f})")
        table.add_row(f"2^{size.bit_length() - 1}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
