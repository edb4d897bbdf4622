"""Products of float32 matrices on the CPU by oneDNN, for machines with slower products in torch itself.

torch multiplies float32 matrices with MKL, which reserves its best code for Intel processors: on an AMD EPYC of 2 cores
with AVX-512, 1024 rows took oneDNN 0.42 to 0.55 of MKL's time (torch 2.13). The faster of the two is measured for each
machine, build of torch and number of threads, in as many rounds as it takes to be sure, and the rounds are saved on
disk with the compiled kernels.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fused.backends.kernel_store import cache, machine, write
from fused.backends.selection import Choice

Tensor = torch.Tensor

ENVIRONMENT_VARIABLE = "FUSED_ONEDNN"
LEAST_SPEEDUP = 1.25
_ROWS, _FEATURES = 256, 1024
_FEWEST_ROUNDS, _ROUNDS, _MOST_ROUNDS = 9, 25, 200
_LARGE, _ROWS_AT_A_TIME = 2**24, 1024


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear(x, weight, bias)`` by oneDNN.

    Args:
        x: ``[..., in]``, float32 on the CPU.
        weight: ``[out, in]``, of any strides.
        bias: ``[out]`` or None.
    """
    if torch.compiler.is_compiling():
        return _in_a_graph(x, weight, bias)
    if x.is_contiguous() or x.numel() < _LARGE:
        return _call(x, weight, bias)
    # oneDNN needs rows, and torch would copy all of x for it.
    result = x.new_empty(*x.shape[:-1], len(weight))
    for rows, to in zip(*(t.reshape(-1, t.shape[-1]).split(_ROWS_AT_A_TIME) for t in (x, result)), strict=True):
        to.copy_(_call(rows, weight, bias))
    return result


def _call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


@torch.library.custom_op(
    "fused::onednn_product",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
)
def _in_a_graph(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product as one custom op, as inductor supports torch's own op only with packed constant weights."""
    return product(x, weight, bias)


@_in_a_graph.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def why_not() -> str:
    """Return the reason for not using oneDNN on this machine, or "" if it is used.

    The environment variable ``FUSED_ONEDNN`` decides, 1 for yes and 0 for no; if unset, the speedup is measured.
    """
    setting = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: got {setting!r}; 1 is oneDNN, 0 torch's own, unset the faster one")
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch has no oneDNN"
    if setting:
        return "" if setting == "1" else f"{ENVIRONMENT_VARIABLE}=0"
    found = speedup(torch.get_num_threads())
    return "" if found.is_gain else f"oneDNN is {found}, and used from {LEAST_SPEEDUP} on"


# As torch.compiler.assume_constant_result does, which would import the compiler with this module.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose(device: str, request: str | None = None) -> Choice:
    """Return the backend for products of large float32 matrices on a device type, with the reason."""
    if device != "cpu":
        return Choice("linear", device, "reference", f"oneDNN multiplies on the CPU, not on {device}")
    if request == "reference":
        return Choice("linear", device, "reference", "reference was asked for")
    problem = why_not()
    if problem:
        return Choice("linear", device, "reference", problem)
    measured = "" if os.environ.get(ENVIRONMENT_VARIABLE) else f", {speedup(torch.get_num_threads())}"
    return Choice("linear", device, "onednn", f"float32 by oneDNN{measured}")


@dataclass(frozen=True)
class Speedup:
    """Speedup of oneDNN's products over torch's, as measured so far.

    Attributes:
        rounds: torch's time divided by oneDNN's, of one product each, in each round.
    """

    rounds: tuple[float, ...] = ()

    @functools.cached_property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of the median at 99 %, from the order of the rounds alone."""
        if len(self.rounds) < _FEWEST_ROUNDS:
            return 0.0, math.inf
        ordered = sorted(self.rounds)
        outside = int(len(ordered) / 2 - 1.29 * math.sqrt(len(ordered)))
        return ordered[outside], ordered[-1 - outside]

    @functools.cached_property
    def is_gain(self) -> bool:
        """Whether oneDNN is surely faster by the least speedup."""
        return self.interval[0] >= LEAST_SPEEDUP

    @property
    def is_settled(self) -> bool:
        """Whether more rounds would not change the answer."""
        return self.is_gain or self.interval[1] < LEAST_SPEEDUP or len(self.rounds) >= _MOST_ROUNDS

    def __str__(self) -> str:
        low, high = self.interval
        times = f"{statistics.median(self.rounds):.2f} times as fast as torch here"
        return f"{times} ({low:.2f} to {high:.2f} in {len(self.rounds)} rounds)"


@functools.cache
def speedup(threads: int) -> Speedup:
    """Return the speedup of oneDNN's products over torch's on this machine, with this number of threads.

    Rounds that do not settle the answer, because the speedup is close to the least one, are added to by the next
    process; until then torch multiplies.
    """
    path = cache() / "fused" / machine() / f"onednn_{threads}.json"
    try:
        known = Speedup(tuple(map(float, json.loads(path.read_text()))))
    except (OSError, TypeError, ValueError):
        known = Speedup()
    if known.is_settled:
        return known
    found = _measured(known)
    text = json.dumps([round(ratio, 3) for ratio in found.rounds])
    write(path, text)  # if it cannot be written, every process measures
    return found


def _measured(known: Speedup) -> Speedup:
    """Add alternating rounds, of some 20 ms each, until they settle the answer or one process has spent enough."""
    with torch.inference_mode(False), torch.no_grad():
        x, weight = (
            torch.full((rows, _FEATURES), 0.5, dtype=torch.float32, device="cpu") for rows in (_ROWS, _FEATURES)
        )
        ways = (F.linear, product)
        for way in ways:
            way(x, weight)
        for count in range(_ROUNDS):
            if known.is_settled:
                break
            seconds = {}
            for way in ways if count % 2 else ways[::-1]:
                start = time.perf_counter()
                way(x, weight)
                seconds[way] = time.perf_counter() - start
            known = Speedup((*known.rounds, seconds[F.linear] / seconds[product]))
    return known
