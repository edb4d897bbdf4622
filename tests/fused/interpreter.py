"""Triton's interpreter, stricter and faster: it rounds and reduces like a GPU, and a kernel stays inside its tensors.

By itself it cuts the digits off in rounding float32 to bfloat16; here they are rounded to the nearest, ties to even.
And it reads any address of the process; here a load or store must be of a storage of the launch, and an unmasked lane
outside of all of them, which on a GPU is an illegal access or silently another tensor, is an error. And it reduces with
a function of a kernel number by number, in Python; here, as on a GPU, one half of a block is combined with the other
until one element is left. It is switched on in `tests/conftest.py`, on machines without CUDA.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

INTERPRETED: bool = knobs.runtime.interpret

if INTERPRETED:
    _reduce_otherwise = interpreter.ReduceOps.generic_reduce
    _cast_otherwise = interpreter.InterpreterBuilder.cast_impl
    _arguments_otherwise = interpreter.GridExecutor._init_args_hst
    _load_otherwise = interpreter.InterpreterBuilder.create_masked_load
    _store_otherwise = interpreter.InterpreterBuilder.create_masked_store
    _storages: list[tuple[int, int]] = []

    def _cast(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            data = torch.tensor(source.data).bfloat16().view(torch.uint16).numpy()
        elif kinds == (tl.bfloat16, tl.float32):
            data = torch.tensor(source.data).view(torch.bfloat16).float().numpy()
        else:
            return _cast_otherwise(self, source, target)
        return interpreter.TensorHandle(data, target.scalar)

    def _arguments(self: Any, args: Any, kwargs: Any) -> Any:
        """Remember the storages of the launch that is about to run."""
        found, named = _arguments_otherwise(self, args, kwargs)
        held = [one.untyped_storage() for one in (*found, *named.values()) if isinstance(one, torch.Tensor)]
        _storages[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in held]
        return found, named

    def _check(pointers: Any, mask: Any) -> None:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        outside = numpy.broadcast_to(numpy.asarray(mask.data, dtype=bool), numpy.shape(pointers.data)).copy()
        for begin, end in _storages:
            outside &= ~((pointers.data >= begin) & (pointers.data <= end - size))
        if outside.any():
            raise IndexError(f"{int(outside.sum())} of {outside.size} lanes are outside of the tensors of the kernel")

    def _reduce(self: Any, blocks: Any) -> Any:
        if self.axis is None:
            return _reduce_otherwise(self, blocks)
        parts, dtypes = [block.handle.data for block in blocks], [block.dtype for block in blocks]
        while parts[0].shape[self.axis] > 1:  # a power of two, as all sizes of blocks
            halves = zip(*(numpy.split(part, 2, self.axis) for part in parts), strict=True)
            low, high = (map(self.to_tensor, half, dtypes) for half in halves)
            combined = self.combine_fn.fn(*low, *high)
            parts = [one.handle.data for one in (combined if isinstance(combined, tuple) else (combined,))]
        if not self.keep_dims:
            parts = [part.squeeze(self.axis) for part in parts]
        return list(map(self.to_tensor, parts, dtypes))

    def _load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask)
        return _load_otherwise(self, pointers, mask, *rest)

    def _store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask)
        return _store_otherwise(self, pointers, value, mask, *rest)

    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.InterpreterBuilder.cast_impl = _cast
    interpreter.GridExecutor._init_args_hst = _arguments
    interpreter.InterpreterBuilder.create_masked_load = _load
    interpreter.InterpreterBuilder.create_masked_store = _store
