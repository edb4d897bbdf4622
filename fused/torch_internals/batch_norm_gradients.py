"""An error of torch's: gradients of batch norms of one sample on the CPU.

Up to torch 2.15 at least, the backward kernel takes a sample with the channels last for one in contiguous memory, if
the other of input and gradient is contiguous and the stride of the samples is not that of a whole one. Such gradients
come from ``flatten(2).transpose(1, 2)`` of the result, as in detection transformers: those of the input and the weight
are wrong by as much as they are large. Instance norms, which run the same kernel on one sample, are affected too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fused.assumptions import holds

Tensor = torch.Tensor


@functools.cache
def is_wrong() -> bool:
    """Check whether this release of torch has the error."""
    x = torch.arange(8.0).view(1, 2, 2, 2)
    last = torch.empty_strided(x.shape, (2, 1, 4, 2)).copy_(x)
    row = torch.ones(2)
    of_x = [
        torch.ops.aten.native_batch_norm_backward(g, x, row, row, row, row, row, False, 0.0, [True, False, False])[0]
        for g in (x, last)
    ]
    return not torch.equal(*of_x)


def strided_like(g: Tensor, x: Tensor) -> Tensor:
    """Return g with the strides of x, of the same shape: of such a gradient the kernel makes no mistake."""
    return g if g.stride() == x.stride() else torch.empty_like(x).copy_(g)


_corrected: list[torch.library.Library] = []
"""The library in use, at most one: torch 2.11 takes no second kernel for one operator."""


@contextmanager
def corrected_gradients() -> Iterator[None]:
    """Make all gradients of batch norms right within the block."""
    if _corrected or not (holds("corrected batch norms") and is_wrong()):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        library.impl("native_batch_norm_backward", _backward, "CPU")
    _corrected.append(library)
    try:
        yield
    finally:
        _corrected.remove(library)
        library._destroy()


def _backward(g: Tensor, x: Tensor, *rows_and_settings: Any) -> Any:
    """Run torch's kernel by another operator, on a gradient with the strides of x."""
    reserved = torch.empty(0, dtype=torch.uint8)
    return torch.ops.aten.batch_norm_backward(strided_like(g, x), x, *rows_and_settings, reserved)
