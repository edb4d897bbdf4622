"""Compiled CPU kernels on disk, stored in inductor's cache folder and valid while their libraries are there.

A kernel is valid for one build of torch, one type of processor, one number of threads and one source of the formulas.
What is stored is run, so it is loaded only from folders and files that no other account can write to, and only as it
was written: entries and libraries carry digests.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fused.private_files import is_private
from fused.whole_files import write_whole

Tensor = torch.Tensor

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kernel:
    """Compiled code for one formula, setting and kind of input.

    Attributes:
        call: takes the list of tensors and empties it; returns the results that are not inputs.
        fits: whether the kernel is valid for tensors of these sizes, passed as one flat list.
        results: for each result of the formula, its index in the output of ``call``, or None, or ``-1 - i`` for the
            i-th tensor itself, which was written to.
        single: whether the formula returns one result, not a tuple.
    """

    call: Callable[[list[Tensor]], Sequence[Any]]
    fits: Callable[[Sequence[int]], bool]
    results: tuple[int | None, ...]
    single: bool

    def __call__(self, inputs: Sequence[Tensor | None]) -> Any:
        tensors = [arg for arg in inputs if arg is not None]
        computed = self.call(list(tensors))
        results = tuple([None if i is None else computed[i] if i >= 0 else tensors[-1 - i] for i in self.results])
        return results[0] if self.single else results


@dataclass(frozen=True)
class Stored:
    """A kernel in its form on disk.

    Attributes:
        source: Python source that defines ``call``.
        libraries: for each name that ``source`` calls, the path of the shared library, relative to the cache, and the
            :func:`digest` of its bytes.
        guard: arithmetic and comparisons of ``t``, the flat list of the sizes of all tensors, as a Python expression.
        results, single: see :class:`Kernel`.
    """

    source: str
    libraries: dict[str, tuple[str, str]]
    guard: str
    results: tuple[int | None, ...]
    single: bool

    def kernel(self) -> Kernel:
        """Load the kernel.

        Raises:
            OSError, ImportError: a library is missing, damaged, or not for this machine.
        """
        names: dict[str, Any] = {
            name: _library(str(cache() / path), expected) for name, (path, expected) in self.libraries.items()
        }
        exec(compile(self.source, "<fused kernel>", "exec"), names)
        return Kernel(names["call"], fitting(self.guard), self.results, self.single)


def cache() -> Path:
    """Return inductor's cache folder, set by TORCHINDUCTOR_CACHE_DIR, or a private one if others can write to that.

    The default one is in the folder for temporary files, where any account may have made it.
    """
    from fused.torch_internals.kernel_cache import cache_dir

    return _private(cache_dir())


@functools.cache
def _private(folder: str) -> Path:
    path = _made(Path(folder))
    if is_private(path) or not path.is_dir():  # without a folder nothing is stored
        return path
    own = _made(Path.home() / ".cache" / "fused_kernels")
    if not is_private(own):
        own = Path(tempfile.mkdtemp(prefix="fused_kernels_"))
    warnings.warn(
        f"compiled code is not loaded from {folder}: another account owns that folder, or can write to it. "
        f"TORCHINDUCTOR_CACHE_DIR is {own} for this process; set it to a folder of your own",
        stacklevel=2,
    )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    return own


def _made(path: Path) -> Path:
    """Make a folder for this account alone, if there is none and one can be made."""
    with suppress(OSError):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def digest(data: bytes) -> str:
    """Return the SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


@functools.cache
def _library(path: str, expected: str) -> Callable[..., None]:
    """Load the function from a library built by inductor for Python, and delete the library if it is damaged."""
    if not is_private(Path(path)):
        raise ImportError(f"{path} may be another account's")
    if digest(Path(path).read_bytes()) != expected:
        Path(path).unlink()  # a damaged library ends the process that loads it
        raise ImportError(f"{path} is damaged")
    # The library asks for this on being loaded.
    from fused.torch_internals.kernel_cache import data_pointer_address

    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data_pointer_address())
    name = f"fused_{hashlib.sha256(path.encode()).hexdigest()[:16]}.kernel"
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not a library")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    kernel: Callable[..., None] = module.kernel
    return kernel


def folder(formula: Callable[..., Any], kind: Hashable) -> Path | None:
    """Return the folder of the kernels for ``formula`` and this kind of inputs, or None if they are not saved."""
    module, name = getattr(formula, "__module__", None) or "", getattr(formula, "__qualname__", "")
    described = repr(kind)
    if not module.startswith(f"{_PACKAGE.name}.") or not name.isidentifier() or " at 0x" in described:
        return None  # another process may mean something else by it
    from fused.torch_internals.kernel_cache import CAN_STORE

    if not CAN_STORE or os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1":
        return None
    settings = {name: value for name, value in os.environ.items() if name.startswith("TORCHINDUCTOR_") or name == "CXX"}
    settings.pop("TORCHINDUCTOR_CACHE_DIR", None)
    key = repr((module, name, described, torch.get_num_threads(), sorted(settings.items())))
    return cache() / "fused" / machine() / hashlib.sha256(key.encode()).hexdigest()[:32]


@functools.cache
def machine() -> str:
    """Return a digest of the conditions for a kernel: torch, the processor, and the source of the formulas."""
    digest = hashlib.sha256()
    build = (torch.__version__, torch.version.git_version, sys.implementation.cache_tag)
    processor = (platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor_flags())
    digest.update(repr((build, processor)).encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _processor_flags() -> str:
    """Return the processor's instruction sets as reported by the system, if available."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def fitting(guard: str) -> Callable[[Sequence[int]], bool]:
    """Compile the guard, a Python expression in ``t``, to a function of the sizes."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    check: Callable[[Sequence[int]], bool] = eval(f"lambda t: {guard}", dict(SYMPY_INTERP))
    return check


def is_arithmetic(guard: str) -> bool:
    """Check whether a guard only computes with sizes and compares them."""
    try:
        return all(map(_is_harmless, ast.walk(ast.parse(f"({guard})", mode="eval"))))
    except SyntaxError:
        return False


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _NAMES
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return (owner == "math" and not node.attr.startswith("_")) or (owner == "torch" and "sym_" in node.attr[:5])
    return isinstance(node, _ARITHMETIC)


_NAMES: tuple[str, ...] = ("t", "math", "torch", "min", "max", "abs", "int", "float", "bool", "round")
_NAMES += ("IsNonOverlappingAndDenseIndicator", "cast_symbool_to_symint_guardless")
_ARITHMETIC: tuple[type, ...] = (ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call)
_ARITHMETIC += (ast.Subscript, ast.Constant, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context)


def load(folder: Path, sizes: Sequence[int]) -> Kernel | None:
    """Load a kernel for ``sizes`` from this folder, or return None if none fits, or is whole and private."""
    if not is_private(folder):
        return None
    for path in sorted(folder.glob("*.json")):
        try:
            text = path.read_text()
            if path.stem != _name(text) or not is_private(path):
                continue
            values = json.loads(text)
            stored = Stored(**{**values, "results": tuple(values["results"])})
            if is_arithmetic(stored.guard) and fitting(stored.guard)(sizes):
                return stored.kernel()
        except Exception:
            continue  # not whole, or its library was cleared away: compiled anew, whatever it is
    return None


def save(folder: Path, stored: Stored) -> None:
    """Save a kernel in the folder, if it can be written, and its guard is arithmetic."""
    if not is_arithmetic(stored.guard):
        return
    text = json.dumps(asdict(stored))
    write(folder / f"{_name(text)}.json", text)


def _name(text: str) -> str:
    """Return the name of an entry, which tells a damaged one."""
    return digest(text.encode())[:16]


def write(path: Path, text: str) -> None:
    """Write a file atomically, or do nothing if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError:
        return
