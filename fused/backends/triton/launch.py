"""Helpers shared by the kernels: rows, block sizes, launching, sums over rows.

A launch costs the processor as much as a small kernel takes: sizes of blocks are looked up and not computed again, and
none of them is found by measuring.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

# Whether kernels run as Python on CPU tensors; fixed when they are defined.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Maximum number of elements in a program's block: accumulators for 16-bit and float32 fit the registers of 16 warps.
BLOCK = 2**13
# A longer row is read in several steps.
WHOLE_ROW = 2**16


class Constant(tl.constexpr):
    """Global constant of kernels.

    At every launch Triton compares each constant with what it was when the kernel was compiled. Two `constexpr` take
    fifteen times as long to compare as their values, since the result is another one.
    """

    def __ne__(self, other: object) -> bool:
        return bool(self.value != getattr(other, "value", other))


@dataclass(frozen=True)
class Tile:
    """Block of one program, rows × columns, both powers of two, with its number of warps."""

    rows: int
    columns: int
    warps: int

    @functools.cached_property
    def settings(self) -> dict[str, int]:
        """ROWS, COLUMNS and num_warps, for a launch."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "num_warps": self.warps}


def cdiv(number: int, by: int) -> int:
    """Divide, rounding up."""
    return -(-number // by)


def power_of_2(number: int) -> int:
    """Return the least power of two from a positive number on."""
    return 1 << (number - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def row_tile(columns: int, *, whole: int = WHOLE_ROW, numbers: int = 2048) -> Tile:
    """Return a block of full rows with `numbers` elements, or of a part of a row if `columns` is above `whole`.

    A kernel that needs full rows (softmax, norms) loops over the columns if ``tile.columns < columns``.
    """
    wide = min(power_of_2(columns), whole)
    if wide < columns:
        wide = min(wide, BLOCK)
    rows = max(numbers // wide, 1)
    return Tile(rows, wide, _warps(rows * wide))


@functools.lru_cache(maxsize=4096)
def column_tile(columns: int, *, numbers: int = 2048) -> Tile:
    """Return a block for elementwise work, of at most 512 columns and `numbers` elements."""
    wide = min(power_of_2(columns), 512)
    return Tile(numbers // wide, wide, _warps(numbers))


def _warps(numbers: int) -> int:
    # At most sixteen elements per thread, up to 16 warps per block.
    return min(max(power_of_2(numbers) // 512, 1), 16)


def as_rows(x: Tensor) -> Tensor:
    """Return x as [rows, columns] with contiguous columns, as a view if its strides allow, else as a copy."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def rows_with_stride(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Return the result of `as_rows` and its row stride, or None and 0 for None."""
    rows = None if x is None else as_rows(x)
    return rows, 0 if rows is None else rows.stride(0)


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor of x's shape; naming shape and device takes torch three times as long."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def compute_type(*tensors: Tensor | None) -> tl.dtype:
    """Return the compute type of a kernel: float64 if one of the tensors has it, else float32."""
    return tl.float64 if any_float64(*tensors) else tl.float32


# Compiled kernels with their constants, by what Triton compiles a kernel for. Emptied when it has grown to `_MOST`.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_MOST = 4096


def any_float64(*tensors: Tensor | None) -> bool:
    """Check whether one of the tensors is float64, of which most kernels compute nothing."""
    return torch.float64 in [tensor.dtype for tensor in tensors if tensor is not None]


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    counts: tuple[int, ...],
    numbers: tuple[float | None, ...],
    **settings: Any,
) -> None:
    """Run ``kernel[grid](*tensors, *counts, *numbers, **settings)`` on the device of the first tensor.

    The second launch for the same types and alignments of tensors, numbers and settings takes the compiled kernel of
    the first, which saves the processor half of a launch.

    Args:
        kernel: its parameters are in this order, the constants last.
        counts: integers that the kernel is not specialized for.
        numbers: each position has one type at all launches; those that vary belong to `counts`.
        settings: the constants in the order of the kernel's parameters, and options of the compiler.
    """
    first: Any = tensors[0]
    device: int = first.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, tensors, counts, numbers, **settings)
    types = [None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]
    small = [-(2**31) <= count < 2**31 for count in counts]
    key = (kernel.fn, device, numbers, *settings.values(), *types, *small)
    known = _compiled.get(key)
    if known is not None:
        compiled, constants = known
        compiled[grid](*tensors, *counts, *numbers, *constants)
        return None
    compiled = kernel[grid](*tensors, *counts, *numbers, **settings)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_compiled) >= _MOST:
            _compiled.clear()
        given = len(tensors) + len(counts) + len(numbers)
        _compiled[key] = compiled, tuple(settings[name] for name in kernel.arg_names[given:])
    return None


def column_partials(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype, rows_at_once: int, *, sums: int = 1
) -> Tensor:
    """Return an empty buffer [programs, sums·columns] for partial sums over rows, to be summed over dimension 0.

    Program n takes the rows from ``n * cdiv(cdiv(rows, rows_at_once), programs) * rows_at_once`` on, see `row_span`.
    The number of programs depends only on the sizes and the type of GPU, so a sum is the same every time.
    """
    programs = min(cdiv(rows, rows_at_once), max(processors(device) * 12 // cdiv(columns, 512), 1))
    return torch.empty(programs, sums * columns, device=device, dtype=dtype)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU, or 2 in the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def row_block(ROWS: tl.constexpr):
    """Return the indices [ROWS, 1], in int64, of the rows of this program along grid dimension 0."""
    return (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]


@triton.jit
def column_block(COLUMNS: tl.constexpr):
    """Return the indices [1, COLUMNS] of the columns of this program along grid dimension 1."""
    return (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]


@triton.jit
def row_span(rows, ROWS: tl.constexpr):
    """Return first row and end, in int64, of the sums of this program of grid dimension 0, in full blocks of ROWS."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    span = tl.cdiv(tl.cdiv(rows, ROWS), programs) * ROWS
    return program * span, tl.minimum((program + 1) * span, rows)
