"""What the kernels share."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import fused
from fused.backends import OPS, Op
from fused.backends.triton.launch import (
    Constant,
    as_rows,
    cdiv,
    column_block,
    column_partials,
    column_tile,
    compute_type,
    launch,
    power_of_2,
    row_block,
    row_span,
    row_tile,
)
from tests.fused.interpreter import INTERPRETED

COLUMNS = (1, 2, 3, 17, 63, 64, 65, 127, 1000, 4097, 50257)


@triton.jit(do_not_specialize=["rows"])
def _double(x, out, rows, columns, stride, COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = row_block(ROWS), column_block(COLUMNS)
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    tl.store(out + row * columns + column, 2 * value.to(COMPUTE), mask=inside)


@triton.jit
def _sum_rows(x, partials, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    start, end = row_span(rows, ROWS)
    column = column_block(COLUMNS)
    total = tl.zeros([1, COLUMNS], partials.dtype.element_ty)
    for first in range(start, end, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        value = tl.load(x + row * stride + column, mask=(row < end) & (column < columns), other=0.0)
        total += tl.sum(value.to(partials.dtype.element_ty), 0, keep_dims=True)
    tl.store(partials + tl.program_id(0) * columns + column, total, mask=column < columns)


@triton.jit
def _changes_type(out, count):
    """Which the interpreter does not mind."""
    total = 0
    for _ in range(count):
        total += 0.5
    tl.store(out, total)


def double(x: torch.Tensor) -> torch.Tensor:
    flat = as_rows(x)
    rows, columns = flat.shape
    tile = column_tile(columns)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    launch(
        _double,
        (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), 1),
        (flat, out),
        (rows,),
        (columns, flat.stride(0)),
        COMPUTE=compute_type(x),
        **tile.settings,
    )
    return out.view(x.shape)


@pytest.fixture
def double_op():
    op = Op("double", forward=lambda x: 2 * x, backward=lambda g: 2 * g)
    op.register("triton", forward=double, backward=double)
    yield op
    del OPS["double"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_column_and_row_is_reached(double_op, check_against_float64, launches, device, columns, dtype):
    check_against_float64(double_op, "forward", (torch.randn(5, columns, device=device).to(dtype),))
    assert launches["_double"] == 1


def test_the_check_notices_a_wrong_kernel(double_op, check_against_float64, device):
    double_op.register("triton", forward=lambda x: double(x) * (1 + 1e-5), backward=double)
    with pytest.raises(AssertionError, match="not close"):
        check_against_float64(double_op, "forward", (torch.randn(5, 64, device=device),))
    double_op.register("triton", forward=lambda x: double(x) * 1.01, backward=double)
    with pytest.raises(AssertionError, match="result 0"):
        check_against_float64(double_op, "forward", (torch.randn(5, 64, device=device).bfloat16(),))
    double_op.register("triton", forward=lambda x: NotImplemented, backward=double)
    with pytest.raises(AssertionError, match="no kernel of double ran"):
        check_against_float64(double_op, "forward", (torch.randn(5, 64, device=device),))


def test_the_interpreter_rounds_as_torch_does(device):
    numbers = torch.tensor(
        [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.0e38, 3.4e38, 1e-40, 7e4, torch.nan, torch.inf, -torch.inf]
    )
    for dtype in (torch.bfloat16, torch.float16):
        x, out = numbers.to(device), torch.empty(1, len(numbers), dtype=dtype, device=device)
        launch(_double, (2, 1, 1), (x / 2, out), (1,), (len(numbers), 0), COMPUTE=tl.float32, ROWS=1, COLUMNS=16)
        torch.testing.assert_close(out[0], x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("columns", [1, 3, 65, 1000])
def test_sums_over_rows(device, rows, columns):
    x = torch.randn(rows, columns, device=device)
    tile = column_tile(columns)
    sums = []
    for _ in range(2):
        partials = column_partials(rows, columns, x.device, torch.float64, tile.rows)
        partials.fill_(torch.nan)
        grid = (len(partials), triton.cdiv(columns, tile.columns), 1)
        launch(_sum_rows, grid, (x, partials), (), (rows, columns, columns), **tile.settings)
        sums.append(partials.sum(0))
    torch.testing.assert_close(sums[0], x.double().sum(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(*sums)


def test_rows_are_a_view_where_strides_allow():
    x = torch.randn(4, 6, 8)
    for view in (x, x[:, :, 1:5], x[:, 0], x[0], x[0, 0], x.expand(4, 6, 8), x[:, :, :1]):
        rows = as_rows(view)
        assert rows.shape == (view.numel() // view.shape[-1], view.shape[-1])
        assert rows.data_ptr() == view.data_ptr() and (rows.stride(1) == 1 or rows.shape[1] == 1)
        assert torch.equal(rows.reshape(view.shape), view)
    for view in (x.mT, x[:, :, ::2], x.transpose(0, 1)):
        assert torch.equal(as_rows(view).reshape(view.shape), view) and as_rows(view).stride(1) == 1


def test_offsets_beyond_two_to_the_31st(far_rows):
    numbers = torch.randn(2, 65, dtype=torch.float16)
    far = far_rows(numbers)
    assert far.stride(0) > 2**31
    assert torch.equal(double(far).cpu(), 2 * numbers)


@pytest.mark.parametrize("columns", COLUMNS)
def test_blocks_hold_a_power_of_two_and_the_columns(columns):
    for tile in (row_tile(columns), column_tile(columns), row_tile(columns, whole=4096)):
        assert tile.rows * tile.columns <= 2**16 and tile.rows >= 1
        assert all(triton.next_power_of_2(number) == number for number in (tile.rows, tile.columns, tile.warps))
    assert row_tile(columns).columns >= columns
    assert (row_tile(columns, whole=4096).columns < columns) == (columns > 4096)


def test_the_type_to_compute_in():
    half, single, double = (torch.ones(1, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64))
    assert compute_type(half, None, torch.ones(1, dtype=torch.bool)) == tl.float32
    assert compute_type(single) == tl.float32 and compute_type(half, double) == tl.float64


def test_the_numbers_of_a_launch():
    for number in (*range(1, 70), 4095, 4096, 4097, 2**31 + 1):
        assert power_of_2(number) == triton.next_power_of_2(number)
        for by in (1, 2, 3, 64, 2**12):
            assert cdiv(number, by) == triton.cdiv(number, by)
    assert cdiv(0, 4) == 0


def test_another_number_of_rows_compiles_nothing(compile_for_hopper):
    code = """
import fused, torch
from triton.runtime.jit import JITFunction
compiled, compile = [], JITFunction._do_compile
JITFunction._do_compile = lambda self, *args, **options: compiled.append(1) or compile(self, *args, **options)
with fused.backend("triton"):
    for rows in (1, 2, 5, 16, 64):
        x = torch.randn(rows, 48)
        fused.bias_gelu(x, torch.randn(48))
        fused.rms_norm(x, torch.randn(48))
        fused.swiglu(x)
        fused.bias_dropout_add(x, torch.randn(48), x, 0.0, False)
assert len(compiled) == 4, len(compiled)
"""
    assert compile_for_hopper(code) == 20


class _Recorded:
    """A kernel that records its launches instead of running, and how often it is compiled."""

    arg_names = ("x", "out", "rows", "columns", "ROWS")

    def __init__(self) -> None:
        self.fn = object()
        self.compilations = 0
        self.arguments = []

    def __getitem__(self, grid):
        def compiling(*args, **settings):
            self.compilations += 1
            return {grid: lambda *args: self.arguments.append(args)}

        return compiling


def test_a_compiled_kernel_is_taken_for_the_same_types_only():
    kernel, x = _Recorded(), torch.zeros(64)

    def launched(x=x, columns=8, rows=3, block=16):
        launch(kernel, (1, 1, 1), (x, None), (rows,), (columns,), num_warps=4, ROWS=block)

    launched()
    launched(rows=5)
    assert kernel.compilations == 1
    (((given, *others),),) = (kernel.arguments,)
    assert given is x and others == [None, 5, 8, 16]
    for changed in ({"x": x.half()}, {"x": x[1:]}, {"columns": 9}, {"rows": 2**31}, {"block": 32}):
        before = kernel.compilations
        launched(**changed)
        launched(**changed)
        assert kernel.compilations == before + 1


def test_compiled_code_runs_beside_the_interpreter(warm_inductor, launches):
    x = torch.randn(64, 64)
    with fused.backend("inductor"):
        result = fused.new_gelu(x)
    torch.testing.assert_close(result, torch.nn.functional.gelu(x, approximate="tanh"))
    assert not launches


def test_kernels_compile_for_a_gpu(compile_for_hopper):
    setup = "import torch; from tests.fused.triton.test_launch import _changes_type, double, launch; "
    assert compile_for_hopper(setup + "double(torch.ones(2, 65))") == 1
    if INTERPRETED:
        launch(_changes_type, (1, 1, 1), (torch.zeros(1),), (), (3,))
    with pytest.raises(AssertionError, match="CompilationError"):
        compile_for_hopper(setup + "launch(_changes_type, (1, 1, 1), (torch.zeros(1),), (), (3,))")


def test_a_constant_compares_as_its_value():
    assert Constant(1.5) != Constant(2.5) and Constant(1.5) != 2.5
    for equal in (Constant(1.5), tl.constexpr(1.5), 1.5):
        assert (Constant(1.5) != equal) is False
