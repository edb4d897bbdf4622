"""Shared by the tests of the Triton kernels, which run on a GPU or, without one, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import KernelInterface

from fused.backends import Op
from tests.fused.interpreter import INTERPRETED

Tensor = torch.Tensor
Results = tuple[Tensor | None, ...]

TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1.3e-6, 1e-6)}


@pytest.fixture(autouse=True)
def _quiet_interpreter() -> Iterator[None]:
    """NumPy warns of NaN and infinities; a GPU does not."""
    with numpy.errstate(all="ignore"):
        yield


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts launches by the name of the kernel, from here on."""
    counts: Counter[str] = Counter()
    first, again = KernelInterface.__getitem__, CompiledKernel.__getitem__

    def compiling(self: Any, grid: Any) -> Any:
        counts[self.fn.__name__] += 1
        return first(self, grid)

    def compiled(self: Any, grid: Any) -> Any:
        counts[self.name] += 1
        return again(self, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", compiling)
    monkeypatch.setattr(CompiledKernel, "__getitem__", compiled)
    return counts


@pytest.fixture
def far_rows(device: str, tmp_path: Path) -> Callable[[Tensor], Tensor]:
    """``far_rows(x)``: a 16-bit [2, columns] tensor with rows more than 2³¹ numbers apart.

    On the CPU it lies in a file with a hole, which takes no space.
    """

    def spread(x: Tensor) -> Tensor:
        stride = 2**31 + 8
        size = stride + x.shape[1]
        if device == "cpu":
            storage = torch.from_file(str(tmp_path / "hole"), shared=True, size=size, dtype=x.dtype)
        else:
            storage = torch.empty(size, dtype=x.dtype, device=device)
        return storage.as_strided(x.shape, (stride, 1)).copy_(x)

    return spread


@pytest.fixture
def compile_for_hopper(tmp_path: Path) -> Callable[[str], int]:
    """``compile_for_hopper(code)``: how many launches of `code` compile for an H200; fails if one does not.

    The code runs in a process of its own with CPU tensors and without the interpreter; every op has its Triton kernels
    compiled and not run, if ``fused.backend("triton")`` asks for them.
    """

    def run(code: str) -> int:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "tests.fused.triton.hopper"]
        done = subprocess.run(command, input=code, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[0])

    return run


@pytest.fixture
def check_against_float64(launches: Counter[str]) -> Callable[..., Results]:
    """``check(op, part, args, sums=(), **statics)``: one part of an Op on Triton against its formula in float64.

    float64 and float32 results keep to the tolerances of the ops; float32 sums over rows, at the positions `sums`, keep
    to them relative to the largest one, or are at most twice as far off as the formula's. 16-bit results are at most
    1.1 × as far off as those of the formula run on the same arguments, which rounds once. Fails if no kernel ran, or if
    dtypes, shapes or what is None differ from the formula's. Returns the results.
    """

    def check(op: Op, part: str, args: Sequence[Any], sums: Sequence[int] = (), **statics: Any) -> Results:
        formula = op.forward if part == "forward" else op.backward
        before = launches.total()
        ours = _as_tuple(op.run(part, args, "triton", **statics))  # type: ignore[arg-type]
        assert launches.total() > before, f"no kernel of {op.name} ran"
        plain = _as_tuple(formula(*args, **statics))
        exact = _as_tuple(formula(*map(_exact, args), **{name: _exact(value) for name, value in statics.items()}))
        for position, results in enumerate(zip(ours, plain, exact, strict=True)):
            _compare(f"{op.name} {part}, result {position}", *results, loose=position in sums)
        return ours

    return check


def _as_tuple(results: Any) -> Results:
    return results if isinstance(results, tuple) else (results,)


def _exact(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _compare(what: str, ours: Tensor | None, plain: Tensor | None, exact: Tensor | None, loose: bool) -> None:
    assert (ours is None) == (plain is None), f"{what}: {type(ours)} against {type(plain)}"
    if ours is None or plain is None or exact is None:
        return
    assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape), what
    rtol, atol = TOLERANCE.get(ours.dtype, (0.0, 0.0))
    if rtol and not loose:
        torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=atol, equal_nan=True)
        return
    assert torch.equal(ours.isfinite(), plain.isfinite()), f"{what}: NaN or infinities elsewhere"
    finite = plain.isfinite()
    if not finite.any():
        return
    error, allowed = ((result.double() - exact)[finite].abs() for result in (ours, plain))
    factor, least = (2.0, atol + rtol * exact[finite].abs().max()) if rtol else (1.1, 0.0)
    for norm in (torch.amax, lambda e: e.square().mean().sqrt()):
        assert norm(error) <= factor * norm(allowed) + least, f"{what}: {norm(error):.3e} against {norm(allowed):.3e}"
