"""Compiled CPU kernels on disk, beside inductor's own cache, for as long as their libraries are in that.

A kernel belongs to one build of torch, one kind of processor, one number of threads and one text of the formulas.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fused.whole_files import write_whole

Tensor = torch.Tensor

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kernel:
    """Compiled code for one formula, setting and kind of input.

    Attributes:
        call: takes the list of tensors and empties it; gives the results that are no inputs.
        fits: whether it holds for tensors of these sizes, all in one row.
        results: for each result of the formula, the place in what ``call`` gives, or None, or ``-1 - i`` for the
            i-th tensor itself, which was written to.
        single: the formula gives one result, not a tuple of them.
    """

    call: Callable[[list[Tensor]], Sequence[Any]]
    fits: Callable[[Sequence[int]], bool]
    results: tuple[int | None, ...]
    single: bool

    def __call__(self, inputs: Sequence[Tensor | None]) -> Any:
        tensors = [arg for arg in inputs if arg is not None]
        computed = self.call(list(tensors))
        results = tuple(None if i is None else computed[i] if i >= 0 else tensors[-1 - i] for i in self.results)
        return results[0] if self.single else results


@dataclass(frozen=True)
class Stored:
    """A kernel as it lies on the disk.

    Attributes:
        source: Python that defines ``call``.
        libraries: the shared library of each name that ``source`` calls, relative to the cache.
        guard: a Python expression about ``t``, the sizes of all tensors in one row.
        results, single: see :class:`Kernel`.
    """

    source: str
    libraries: dict[str, str]
    guard: str
    results: tuple[int | None, ...]
    single: bool

    def kernel(self) -> Kernel:
        """What runs it.

        Raises:
            OSError, ImportError: a library is gone, or not for this machine.
        """
        names: dict[str, Any] = {name: _library(str(cache() / path)) for name, path in self.libraries.items()}
        exec(compile(self.source, "<fused kernel>", "exec"), names)
        return Kernel(names["call"], fitting(self.guard), self.results, self.single)


def cache() -> Path:
    """Where inductor keeps its libraries; TORCHINDUCTOR_CACHE_DIR sets it."""
    from fused.torch_internals.kernel_cache import cache_dir

    return Path(cache_dir())


@functools.cache
def _library(path: str) -> Callable[..., None]:
    """The function in a library that inductor built for Python."""
    # The library asks for this on being loaded.
    from fused.torch_internals.kernel_cache import data_pointer_address

    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data_pointer_address())
    name = f"fused_{hashlib.sha256(path.encode()).hexdigest()[:16]}.kernel"
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no library")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    kernel: Callable[..., None] = module.kernel
    return kernel


def place(formula: Callable[..., Any], kind: Hashable) -> Path | None:
    """The folder of the kernels for ``formula`` and this kind of inputs; None if they are not kept."""
    module, name = getattr(formula, "__module__", None) or "", getattr(formula, "__qualname__", "")
    described = repr(kind)
    if not module.startswith(f"{_PACKAGE.name}.") or not name.isidentifier() or " at 0x" in described:
        return None  # another process may mean something else by it
    if os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1":
        return None
    settings = {name: value for name, value in os.environ.items() if name.startswith("TORCHINDUCTOR_") or name == "CXX"}
    settings.pop("TORCHINDUCTOR_CACHE_DIR", None)
    key = repr((module, name, described, torch.get_num_threads(), sorted(settings.items())))
    return cache() / "fused" / machine() / hashlib.sha256(key.encode()).hexdigest()[:32]


@functools.cache
def machine() -> str:
    """What a kernel is bound to: torch, the processor, and the text of the formulas."""
    digest = hashlib.sha256()
    build = (torch.__version__, torch.version.git_version, sys.implementation.cache_tag)
    processor = (platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor_flags())
    digest.update(repr((build, processor)).encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _processor_flags() -> str:
    """The instructions that the processor knows, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def fitting(guard: str) -> Callable[[Sequence[int]], bool]:
    """The guard as a function of the sizes.

    Args:
        guard: a Python expression about ``t``, the sizes.
    """
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    check: Callable[[Sequence[int]], bool] = eval(f"lambda t: {guard}", dict(SYMPY_INTERP))
    return check


def load(place: Path, sizes: Sequence[int]) -> Kernel | None:
    """A kernel of this folder that fits ``sizes`` and whose libraries are there, if there is one."""
    for path in sorted(place.glob("*.json")):
        try:
            values = json.loads(path.read_text())
            stored = Stored(**{**values, "results": tuple(values["results"])})
            if fitting(stored.guard)(sizes):
                return stored.kernel()
        except Exception:
            continue  # not whole, or its library was cleared away: compiled anew, whatever it is
    return None


def save(place: Path, stored: Stored) -> None:
    """Keep a kernel; where the folder cannot be written, do without."""
    text = json.dumps(asdict(stored))
    write(place / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json", text)


def write(path: Path, text: str) -> None:
    """A file, whole or not at all; where it cannot be written, there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError:
        return
