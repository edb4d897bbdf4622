"""Compiles kernels for an H100 or H200, on any machine: ``python -m tests.fused.triton.hopper`` + code from stdin.

The interpreter takes what the compiler refuses. Here every launch is compiled by Triton and
by its ptxas, and none is run: results are whatever the memory held.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from fused.backends import availability

HOPPER = GPUTarget("cuda", 90, 32)


class _Absent:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_only(self: Any, grid: Any) -> Any:
    def compiled(*args: Any, **settings: Any) -> None:
        global launches
        launches += 1
        self.run(*args, grid=grid, warmup=True, **settings)

    return compiled


launches = 0


def install() -> None:
    """Have every launch of this process compile its kernel for a Hopper GPU and not run it."""
    driver.set_active(_Absent())  # type: ignore[arg-type]
    KernelInterface.__getitem__ = _compile_only
    availability.why_unavailable = lambda backend, device: None


if __name__ == "__main__":
    install()
    torch.manual_seed(0)
    exec(compile(sys.stdin.read(), "code", "exec"))
    print(f"{launches} launches compiled")
