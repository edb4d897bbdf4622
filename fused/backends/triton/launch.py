"""What the kernels share: rows, block sizes, tuning, launching, sums over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]

# Kernels run as Python on CPU tensors: fixed when they are defined.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Numbers in a program's block, at most: 16-bit and float32 accumulators both fit the registers of 16 warps.
BLOCK = 2**13
# A longer row is read in several steps.
WHOLE_ROW = 2**16

_COMPUTE = {torch.float16: tl.float32, torch.bfloat16: tl.float32, torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True)
class Tile:
    """The block of one program, rows × columns, both powers of two, and the warps for it."""

    rows: int
    columns: int
    warps: int

    @property
    def block(self) -> dict[str, int]:
        """ROWS and COLUMNS, for a launch of a kernel whose warps are tuned."""
        return {"ROWS": self.rows, "COLUMNS": self.columns}

    @property
    def settings(self) -> dict[str, int]:
        """ROWS, COLUMNS and num_warps, for a launch."""
        return {**self.block, "num_warps": self.warps}


def row_tile(columns: int, *, whole: int = WHOLE_ROW, numbers: int = 2048) -> Tile:
    """A block of whole rows, as many as make `numbers`; of a part of one row where `columns` is above `whole`.

    A kernel that needs whole rows (softmax, norms) loops over the columns where ``tile.columns < columns``.
    """
    wide = min(triton.next_power_of_2(columns), whole)
    if wide < columns:
        wide = min(wide, BLOCK)
    rows = max(numbers // wide, 1)
    return Tile(rows, wide, _warps(rows * wide))


def column_tile(columns: int, *, numbers: int = 2048) -> Tile:
    """A block for work on single numbers: at most 512 columns, and the rows that make `numbers`."""
    wide = min(triton.next_power_of_2(columns), 512)
    return Tile(numbers // wide, wide, _warps(numbers))


def _warps(numbers: int) -> int:
    # Sixteen numbers a thread at most, until there are as many threads as a block may well have.
    return min(max(triton.next_power_of_2(numbers) // 512, 1), 16)


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, columns] with columns side by side in memory: a view where its strides allow, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def rows_with_stride(x: Tensor | None) -> tuple[Tensor | None, int]:
    """What `as_rows` gives and its stride, for a tensor that may not be there."""
    rows = None if x is None else as_rows(x)
    return rows, 0 if rows is None else rows.stride(0)


def compute_type(*tensors: Tensor | None) -> tl.dtype:
    """The type that a kernel computes in: float64 if one of the tensors has it, else float32."""
    found = {_COMPUTE[tensor.dtype] for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    return tl.float64 if tl.float64 in found else tl.float32


def launch(kernel: Any, grid: Grid, *args: Any, **settings: Any) -> None:
    """``kernel[grid](*args, **settings)`` on the device of the first argument, a tensor."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **settings)


def tuned(configs: Sequence[triton.Config], key: Sequence[str]) -> Callable[[Any], Any]:
    """Decorator above `triton.jit`: the fastest of a few configurations, measured once for each value of `key`.

    What was measured is kept beside the compiled kernels. Only the first configuration runs in the interpreter. Keep
    the number of rows out of `key`: every batch size would be measured anew.
    """

    def decorate(kernel: Any) -> Any:
        chosen = list(configs[:1]) if INTERPRETED else list(configs)
        return triton.autotune(chosen, key=list(key), cache_results=True)(kernel)

    return decorate


# Four to sixteen numbers a thread, of a block of `column_tile`.
warps_tuned = tuned([triton.Config({}, num_warps=warps) for warps in (4, 8, 16)], key=["columns"])


def column_partials(rows: int, columns: int, device: torch.device, dtype: torch.dtype, rows_at_once: int) -> Tensor:
    """An empty buffer [programs, columns] for the sums over rows of that many programs, to be summed over dimension 0.

    Program n takes the rows from ``n * cdiv(cdiv(rows, rows_at_once), programs) * rows_at_once`` on, see `row_span`.
    The number of programs depends on the sizes and the kind of GPU alone, so a sum is the same every time.
    """
    programs = min(triton.cdiv(rows, rows_at_once), max(processors(device) * 4 // triton.cdiv(columns, 512), 1))
    return torch.empty(programs, columns, device=device, dtype=dtype)


def processors(device: torch.device) -> int:
    """Those of the GPU; 2 in the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def row_block(ROWS: tl.constexpr):
    """Numbers [ROWS, 1], in int64, of the rows of this program along grid dimension 0."""
    return (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]


@triton.jit
def column_block(COLUMNS: tl.constexpr):
    """Numbers [1, COLUMNS] of the columns of this program along grid dimension 1."""
    return (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]


@triton.jit
def row_span(rows, ROWS: tl.constexpr):
    """First row and end, in int64, of what this program of grid dimension 0 sums up; whole blocks of ROWS."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    span = tl.cdiv(tl.cdiv(rows, ROWS), programs) * ROWS
    return program * span, tl.minimum((program + 1) * span, rows)
