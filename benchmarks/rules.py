"""Minimum sizes for profitable rewrites: ``python -m benchmarks.rules``.

Times training steps (forward and backward) of each construct alone, eager against fused, interleaved, at growing sizes.
``schedule/rules/thresholds.py`` contains the thresholds derived from the results.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import fused
from schedule.rules.merged_linear import merged_linear

HIDDEN = 256
KEYS = 64

Function = Callable[..., Any]
Inputs = Callable[[int, str], tuple[Tensor, ...]]


def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute GPT-2's MLP up to its activation."""
    z = F.linear(x, weight, bias)
    return 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * torch.pow(z, 3.0))))


def attention(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Compute the part of eager attention between its two matrix products."""
    return F.dropout(F.softmax(x * 0.125 + mask, dim=-1), p)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Apply Llama's RMSNorm, in float32."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Apply Cohere's layer norm."""
    x = x - x.mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply Llama's rotary embedding to one tensor."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def both(results: tuple[Tensor, Tensor]) -> Tensor:
    """Add the two results, so both are used."""
    return results[0] + results[1]


def added_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Combine the three projections, so all are used."""
    return q + k * v


def added(norm: Function) -> Function:
    """Return a function for a residual sum before a norm, with both results used."""
    return lambda x, other, *rest: both((norm(x + other, *rest), x + other))


def rows(*more: str) -> Inputs:
    """Return a maker of inputs: x of [rows, hidden], then one tensor per name.

    Args:
        more: ``"like"`` for another x, ``"weight"`` for a frozen [hidden, hidden], ``"bias"`` for [hidden].
    """

    def make(elements: int, device: str) -> tuple[Tensor, ...]:
        shapes = {"like": (elements // HIDDEN, HIDDEN), "weight": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}
        kinds = ("like", *more)
        return tuple(torch.randn(shapes[kind], device=device, requires_grad=kind != "weight") for kind in kinds)

    return make


def layer(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make x of [rows, hidden], a weight and a bias, all requiring gradients."""
    shapes = (elements // HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,)
    return tuple(torch.randn(shape, device=device, requires_grad=True) for shape in shapes)


def projections(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make x of [rows, hidden] and the weights of queries, keys and values, all requiring gradients."""
    shapes = (elements // HIDDEN, HIDDEN), *((HIDDEN, HIDDEN),) * 3
    return tuple(torch.randn(shape, device=device, requires_grad=True) for shape in shapes)


def scores(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make attention scores [1, heads, 64, 64] and a mask."""
    x = torch.randn(1, max(elements // KEYS**2, 1), KEYS, KEYS, device=device, requires_grad=True)
    return x, torch.zeros(1, 1, KEYS, KEYS, device=device)


def hidden_scores(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make the same scores and a bool mask of later keys."""
    return scores(elements, device)[0], torch.ones(KEYS, KEYS, dtype=torch.bool, device=device).triu(1)


def heads(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make queries [1, seq, 4, 64] transposed to [1, 4, seq, 64] as in attention, and cos and sin."""
    x = torch.randn(1, elements // HIDDEN, 4, 64, device=device, requires_grad=True).transpose(1, 2)
    return x, *(torch.randn(1, 1, elements // HIDDEN, 64, device=device) for _ in range(2))


def modulated(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make two sequences [2, length, 256], and a scale and shift of each."""
    shapes = ((2, elements // (2 * HIDDEN), HIDDEN), (2, 1, HIDDEN), (2, 1, HIDDEN))
    return tuple(torch.randn(shape, device=device, requires_grad=True) for shape in shapes)


def modulated_sum(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make the residual and the result of a block, of two sequences [2, length, 256], and a gate of each."""
    x, gate, _ = modulated(elements, device)
    return torch.randn_like(x, requires_grad=True), x, gate


def image(elements: int, device: str) -> tuple[Tensor, ...]:
    """Make features [2, 128, width, width] of a UNet, a weight, a bias, and a scale and shift of each sample."""
    width = max(int((elements / 256) ** 0.5), 1)
    shapes = ((2, 128, width, width), (128,), (128,), (2, 128, 1, 1), (2, 128, 1, 1))
    return tuple(torch.randn(shape, device=device, requires_grad=True) for shape in shapes)


CONSTRUCTS: dict[str, tuple[Inputs, Function, Function]] = {
    "formula": (
        rows("weight", "bias"),
        formula,
        lambda x, w, bias: fused.bias_activation(F.linear(x, w), bias, "gelu_tanh"),
    ),
    "single": (
        rows("weight", "bias"),
        lambda x, w, bias: F.gelu(F.linear(x, w, bias)),
        lambda x, w, bias: fused.bias_activation(F.linear(x, w), bias, "gelu"),
    ),
    "softmax": (
        scores,
        lambda x, mask: attention(x, mask, 0.0),
        lambda x, mask: fused.scaled_masked_softmax(x, mask, 0.125),
    ),
    "softmax, filled": (
        hidden_scores,
        lambda x, hidden: F.softmax((x * 0.125).masked_fill(hidden, -torch.inf), dim=-1),
        lambda x, hidden: fused.scaled_masked_softmax(x, hidden, 0.125, fill=-torch.inf),
    ),
    "softmax, dropout": (
        scores,
        lambda x, mask: attention(x, mask, 0.1),
        lambda x, mask: fused.scaled_masked_softmax(x, mask, 0.125, dropout_p=0.1),
    ),
    "rms_norm": (rows("bias"), rms_norm, fused.rms_norm),
    "rms_norm, sum": (rows("like", "bias"), added(rms_norm), lambda *given: both(fused.add_rms_norm(*given))),
    "rms_norm, single": (
        rows("bias"),
        lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-6),
        lambda x, w: fused.rms_norm(x, w, 1e-6, casting="torch"),
    ),
    "layer_norm": (rows("bias"), layer_norm, lambda x, w: fused.layer_norm(x, w, None)),
    "layer_norm, single": (
        rows("bias", "bias"),
        lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b),
        fused.layer_norm,
    ),
    "layer_norm, sum": (
        rows("like", "bias", "bias"),
        added(lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b)),
        lambda *given: both(fused.add_layer_norm(*given)),
    ),
    "adaptive_layer_norm": (
        modulated,
        lambda x, scale, shift: F.layer_norm(x, (HIDDEN,)) * (1 + scale) + shift,
        fused.adaptive_layer_norm,
    ),
    "batch_norm": (
        image,
        lambda x, w, b, scale, shift: F.relu(F.batch_norm(x, None, None, w, b, True)),
        lambda x, w, b, scale, shift: fused.batch_norm(x, None, None, w, b, True, activation="relu"),
    ),
    "group_norm": (
        image,
        lambda x, w, b, scale, shift: F.silu(F.group_norm(x, 32, w, b)),
        lambda x, w, b, scale, shift: fused.group_norm(x, 32, w, b, activation="silu"),
    ),
    "group_norm, scale": (
        image,
        lambda x, w, b, scale, shift: F.silu(F.group_norm(x, 32, w, b) * (1 + scale) + shift),
        lambda x, w, b, scale, shift: fused.group_norm(x, 32, w, b, activation="silu", scale=scale, shift=shift),
    ),
    "gated_residual": (
        modulated_sum,
        lambda residual, value, gate: residual + gate * value,
        fused.gated_residual,
    ),
    "gated": (
        rows("like"),
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: fused.gated_activation(gate, up, "silu"),
    ),
    "gated, packed": (
        rows(),
        lambda y: F.silu(y[..., : HIDDEN // 2]) * y[..., HIDDEN // 2 :],
        fused.swiglu,
    ),
    "rotary": (
        heads,
        lambda x, cos, sin: both((rotary(x, cos, sin), rotary(x, cos, sin))),
        lambda x, cos, sin: both(fused.rotary_embedding(x, x, cos, sin, unsqueeze_dim=None)),
    ),
    "dropout": (
        rows("weight", "bias"),
        lambda x, w, bias: F.dropout(F.linear(x, w, bias), 0.1),
        lambda x, w, bias: fused.bias_dropout(F.linear(x, w), bias, 0.1),
    ),
    "linear": (layer, F.linear, fused.linear),
    "qkv_merge": (
        projections,
        lambda x, q, k, v: added_up(fused.linear(x, q), fused.linear(x, k), fused.linear(x, v)),
        lambda x, *weights: added_up(*merged_linear(x, weights)),
    ),
    "dropout, sum": (
        rows("weight", "bias"),
        lambda x, w, bias: x + F.dropout(F.linear(x, w, bias), 0.1),
        lambda x, w, bias: fused.bias_dropout_add(F.linear(x, w), bias, x, 0.1),
    ),
}


def seconds(function: Function, given: tuple[Tensor, ...], repeats: int) -> float:
    """Return the seconds of one forward and backward, averaged over ``repeats``."""
    start = time.perf_counter()
    for _ in range(repeats):
        function(*given).sum().backward()
    if given[0].is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def compare(kind: str, elements: int, device: str, rounds: int) -> tuple[float, float]:
    """Return the median seconds of eager and of fused, measured alternately."""
    make, eager, ours = CONSTRUCTS[kind]
    given = make(elements, device)
    repeats = max(1, min(200, 2**22 // elements))
    for function in (eager, ours):
        seconds(function, given, 3)
    pairs = [(seconds(eager, given, repeats), seconds(ours, given, repeats)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def main() -> None:
    """Measure the constructs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=list(CONSTRUCTS), help="constructs, all by default")
    parser.add_argument("--largest", type=int, default=23, help="as a power of 2")
    options = parser.parse_args()
    importlib.import_module("fused.linear").LEAST_PRODUCTS = 0  # type: ignore[attr-defined]  # to measure it
    sizes = [2**power for power in range(14, options.largest + 1)]
    table = Table(title=f"eager / fused (ratio), µs a step on {options.device}, {torch.get_num_threads()} threads")
    for name in ("elements", *options.only):
        table.add_column(name, justify="right")
    for size in track(sizes, "measuring", console=Console(stderr=True)):
        cells = []
        for kind in options.only:
            eager, ours = compare(kind, size, options.device, options.rounds)
            cells.append(f"{eager * 1e6:,.0f} / {ours * 1e6:,.0f} ({ours / eager:.2f})")
        table.add_row(f"2^{size.bit_length() - 1}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
