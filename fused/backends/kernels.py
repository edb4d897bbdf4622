"""Compiled CPU kernels: traced and compiled once, saved on disk, loaded by later processes without the compiler.

Importing inductor takes seconds and tracing a formula for it half a second more, even with warm caches. Its final
output for a formula is one shared library and a few lines of Python that allocate the results and call it: these
are saved, with the guards on the sizes. A process that finds them runs them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from fused.backends import kernel_store
from fused.backends.kernel_store import Kernel

Formula = Callable[..., Any]
Tensor = torch.Tensor

# A compiled call on the CPU has an overhead of about 10 µs, and the first call compiles for seconds: not below this.
SMALL_ON_CPU = 2**15
MAX_KERNELS = 16  # of one formula, setting and kind of input: more would mean specializing on ever-changing sizes
_MAX_SIZES = 4096

_kernels: dict[Hashable, list[Kernel]] = {}
_by_sizes: dict[Hashable, Kernel] = {}  # the kernel of each call that was made, without asking for its kind
_lock = threading.RLock()


class TooManyKernels(Exception):
    """Raised if a formula has been compiled for too many kinds of sizes."""


def kernel_for(formula: Formula, inputs: Sequence[Tensor | None], statics: Mapping[str, Hashable]) -> Kernel:
    """Return a kernel for ``formula(*inputs, **statics)`` at these sizes: cached, loaded from disk, or compiled now.

    Args:
        formula: plain torch operations.
        inputs: contiguous tensors on the CPU without a gradient, or None.
        statics: settings for which the code is specialized.

    Raises:
        TooManyKernels: no kernel fits, and there are `MAX_KERNELS` of this kind.
        Exception: any error of tracing or compiling.
    """
    shapes = tuple([None if arg is None else (arg.dtype, arg.shape) for arg in inputs])
    settings = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    call = (formula, tuple(statics.items()), shapes, settings)
    kernel = _by_sizes.get(call)
    if kernel is None:
        with _lock:
            kernel = _found(formula, inputs, statics, settings)
            if len(_by_sizes) >= _MAX_SIZES:
                _by_sizes.clear()
            _by_sizes[call] = kernel
    return kernel


def _kind(tensors: Sequence[Tensor | None], statics: Mapping[str, Hashable], settings: Hashable) -> Hashable:
    """Return what a kernel is compiled for, besides the sizes that its guard asks for."""
    shapes = tuple(None if each is None else (each.dtype, *(min(size, 2) for size in each.shape)) for each in tensors)
    largest = max(each.numel() for each in tensors if each is not None)
    return tuple(statics.items()), shapes, _magnitude(largest), settings


def _magnitude(elements: int) -> int:
    """Return the power of 8 of a large number of elements, 0 for a small one.

    The compiler chooses loops and threads by the sizes at tracing time.
    """
    return 0 if elements < SMALL_ON_CPU else elements.bit_length() // 3


def _found(
    formula: Formula, inputs: Sequence[Tensor | None], statics: Mapping[str, Hashable], settings: Hashable
) -> Kernel:
    """Return a fitting kernel from this process or the disk, or compile one."""
    kind = _kind(inputs, statics, settings)
    sizes = [size for arg in inputs if arg is not None for size in arg.shape]
    known = _kernels.setdefault((formula, kind), [])
    fitting = next((kernel for kernel in known if kernel.fits(sizes)), None)
    if fitting is not None:
        return fitting
    if len(known) >= MAX_KERNELS:
        raise TooManyKernels
    folder = kernel_store.folder(formula, kind)
    kernel = None if folder is None else kernel_store.load(folder, sizes)
    if kernel is None:
        from fused.backends import kernel_compiler  # imports the compiler

        kernel = kernel_compiler.compiled(formula, inputs, statics, folder)
    known.append(kernel)
    return kernel
