"""Products of float32 matrices on the CPU by oneDNN, for machines with slower products in torch itself.

torch multiplies float32 matrices with MKL, which reserves its best code for Intel processors: on an AMD EPYC of 2 cores
with AVX-512, 1024 rows took oneDNN 0.42 to 0.55 of MKL's time (torch 2.13). The faster of the two is measured once
for each machine, build of torch and number of threads, and saved on disk with the compiled kernels.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fused.backends.kernel_store import cache, machine, write
from fused.backends.selection import Choice

Tensor = torch.Tensor

ENVIRONMENT_VARIABLE = "FUSED_ONEDNN"
LEAST_SPEEDUP = 1.25
_ROWS, _FEATURES, _ROUNDS = 256, 1024, 5
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
    return (
        "" if found >= LEAST_SPEEDUP else f"torch's own products are as fast here: oneDNN's {found:.2f} times as fast"
    )


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
    ratio = "" if os.environ.get(ENVIRONMENT_VARIABLE) else f", {speedup(torch.get_num_threads()):.1f} × as fast here"
    return Choice("linear", device, "onednn", f"float32 by oneDNN{ratio}")


@functools.cache
def speedup(threads: int) -> float:
    """Return the speedup of oneDNN's products over torch's on this machine, with this number of threads."""
    path = cache() / "fused" / machine() / f"onednn_{threads}.txt"
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        found = _measured()
        write(path, f"{found:.3f}")  # if it cannot be written, every process measures
        return found


def _measured() -> float:
    """Measure the speedup as the ratio of the best of a few alternating rounds, in a thirtieth of a second."""
    with torch.inference_mode(False), torch.no_grad():
        x, weight = (
            torch.full((rows, _FEATURES), 0.5, dtype=torch.float32, device="cpu") for rows in (_ROWS, _FEATURES)
        )
        seconds: dict[Callable[..., Tensor], float] = {F.linear: float("inf"), product: float("inf")}
        for _ in range(_ROUNDS):
            for way in seconds:
                start = time.perf_counter()
                way(x, weight)
                seconds[way] = min(seconds[way], time.perf_counter() - start)
    return seconds[F.linear] / seconds[product]
