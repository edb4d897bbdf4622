"""Triton's interpreter, rounding float32 to bfloat16 as a GPU does: to the nearest, ties to even.

By itself it cuts the digits off. It is switched on in `tests/conftest.py`, on machines without CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

INTERPRETED: bool = knobs.runtime.interpret

if INTERPRETED:
    _cast_otherwise = interpreter.InterpreterBuilder.cast_impl

    def _cast(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.float32, tl.bfloat16):
            data = torch.tensor(source.data).bfloat16().view(torch.uint16).numpy()
        elif kinds == (tl.bfloat16, tl.float32):
            data = torch.tensor(source.data).view(torch.bfloat16).float().numpy()
        else:
            return _cast_otherwise(self, source, target)
        return interpreter.TensorHandle(data, target.scalar)

    interpreter.InterpreterBuilder.cast_impl = _cast
