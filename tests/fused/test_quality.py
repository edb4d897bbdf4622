"""The quality lines of every fused op, from the table in `cases.py`, on every backend."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

import fused
from fused.backends import availability
from tests.fused.cases import Case, Function, Tensor, all_cases

CASES = all_cases()
HALVES = (torch.bfloat16, torch.float16)
COMPILED = (15, 33)  # one size for tests that need no other: each is compiled
INTERPRETED = not torch.cuda.is_available()
every_case = pytest.mark.parametrize("case", CASES, ids=str)
smooth_case = pytest.mark.parametrize("case", [case for case in CASES if not case.random], ids=str)


@pytest.fixture(params=["reference", "inductor", "triton"])
def on_backend(request: pytest.FixtureRequest, case: Case) -> Iterator[str]:
    """Each backend in turn, without a fallback to another; Triton through its interpreter where there is no card."""
    name: str = request.param
    if name == "triton" and not case.triton:
        pytest.skip("no Triton kernels: " + case.name)
    if name == "inductor":
        request.getfixturevalue("warm_inductor")
    with pytest.MonkeyPatch.context() as patch:
        if name == "triton" and INTERPRETED:
            patch.setenv("TRITON_INTERPRET", "1")
        assert availability.why_unavailable(name, device_for(name)) is None
        patch.setattr(availability, "warn_once", pytest.fail)
        with fused.backend(name):
            yield name


def device_for(backend: str) -> str:
    return "cuda" if backend == "triton" and not INTERPRETED else "cpu"


def sample(
    case: Case, rows: int, columns: int, dtype: torch.dtype = torch.float64, backend: str = "reference"
) -> tuple[Tensor, ...]:
    """Inputs of a case on the device of a backend, the floating-point ones in `dtype`."""
    torch.manual_seed(0)
    device = device_for(backend)
    return tuple(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in case.inputs(rows, columns))


def results(function: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What the function returns, as a tuple, under the one seed."""
    torch.manual_seed(1)
    out = function(*inputs)
    return out if isinstance(out, tuple) else (out,)


def leaves(case: Case, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The inputs afresh, those that get a gradient requiring it."""
    wanted = case.differentiable(tuple(inputs))
    return tuple(t.detach().clone().requires_grad_(n in wanted) for n, t in enumerate(inputs))


def run(case: Case, function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results and gradients for fixed random incoming gradients, whatever the dtype."""
    given = leaves(case, inputs)
    outs = results(function, *given)
    generator = torch.Generator().manual_seed(2)
    incoming = [torch.randn(out.shape, dtype=torch.float64, generator=generator).bfloat16() for out in outs]
    gradients = torch.autograd.grad(
        outs, [t for t in given if t.requires_grad], [g.to(out) for g, out in zip(incoming, outs, strict=True)]
    )
    return (*(out.detach() for out in outs), *gradients)


def closed(case: Case) -> Function:
    """The op under its seed."""
    return lambda *inputs: results(case.op, *inputs)


def assert_within(case: Case, ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """float32 against float64: rtol 1.3e-6, atol 1e-6; a gradient summed over rows may be as far off as eager's."""
    summed = sums_of(case, len(exact))
    for position, (mine, theirs, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        error, limit = (mine.double() - truth).abs(), 1e-6 + 1.3e-6 * truth.abs()
        fine = error <= limit
        if position in summed:
            fine |= error <= (theirs.double() - truth).abs().max()
        assert fine.all(), f"result {position}: off by {error.max():.3e}"


@pytest.mark.one_in(12)
@every_case
def test_within_the_tolerances_on_every_backend(case: Case, on_backend: str) -> None:
    inputs = sample(case, *COMPILED, torch.float32, on_backend)
    exact = run(case, case.eager, [t.double() if t.is_floating_point() else t for t in inputs])
    eager = run(case, case.eager, inputs)
    ours = run(case, case.op, inputs)
    assert [t.dtype for t in ours] == [t.dtype for t in eager]
    assert_within(case, ours, eager, exact)


def sums_of(case: Case, count: int) -> set[int]:
    """Positions of the gradients summed over rows, among `count` results and gradients."""
    inputs = case.differentiable(sample(case, 2, 4))
    return {count - len(inputs) + inputs.index(position) for position in case.sums}


@pytest.mark.parametrize("case", [case for case in CASES if case.sums], ids=str)
def test_compiled_sums_over_many_rows_are_as_close_as_those_of_eager(case: Case, warm_inductor: None) -> None:
    """Loops that add row after row lose digits; the Triton kernels have none over many rows."""
    ours, eager, size = (defaultdict[int, float](float) for _ in range(3))
    for rows in range(256, 416, 20):  # several draws: sums of a few columns are close or far by chance
        inputs = sample(case, rows, 49, torch.float32)
        exact = run(case, case.eager, [t.double() if t.is_floating_point() else t for t in inputs])
        theirs = run(case, case.eager, inputs)
        with fused.backend("inductor"):
            mine = run(case, case.op, inputs)
        for position in sums_of(case, len(exact)):
            truth = exact[position]
            for squares, error in ((ours, mine[position] - truth), (eager, theirs[position] - truth), (size, truth)):
                squares[position] += float(error.square().sum())
    for position, truth in size.items():
        allowed = max(4 * eager[position], torch.finfo(torch.float32).eps ** 2 * truth)  # of squares
        assert ours[position] <= allowed, f"result {position}: {ours[position]:.1e} off, eager {eager[position]:.1e}"


@every_case
def test_float64_is_exact(case: Case) -> None:
    inputs = sample(case, 15, 33)
    torch.testing.assert_close(run(case, case.op, inputs), run(case, case.eager, inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(3)
@every_case
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_no_worse_than_eager(
    case: Case, dtype: torch.dtype, on_backend: str, assert_no_worse: Callable[..., None]
) -> None:
    inputs = sample(case, 40, 65, dtype, on_backend)
    exact = run(case, case.eager, [t.double() if t.is_floating_point() else t for t in inputs])
    eager = run(case, case.eager, inputs)
    ours = run(case, case.op, inputs)
    assert [t.dtype for t in ours] == [t.dtype for t in eager]
    assert_no_worse(ours, eager, exact)


@pytest.mark.one_in(10)
@every_case
def test_gradients_of_both_orders(case: Case) -> None:
    given = leaves(case, sample(case, 2, 3))
    assert gradcheck(closed(case), given, check_forward_ad=not case.random, check_batched_grad=not case.random)
    assert gradgradcheck(closed(case), given)


@every_case
def test_gradients_of_both_orders_where_an_operand_is_computed_from_another(case: Case) -> None:
    """Such as a tied weight, or keys that are values; where the sizes are the same, both are one tensor, too."""
    inputs = sample(case, 2, 3)
    for one, other in itertools.permutations(case.differentiable(inputs), 2):
        ways = [lambda a, b: b + a.sin().mean()]
        if inputs[one].shape == inputs[other].shape:
            ways.append(lambda a, b: a)
        for way in ways:
            ours = _tied_gradients(case, case.op, inputs, one, other, way)
            theirs = _tied_gradients(case, case.eager, inputs, one, other, way)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def _tied_gradients(
    case: Case, function: Function, inputs: Sequence[Tensor], one: int, other: int, way: Callable[..., Tensor]
) -> list[Tensor]:
    """First and second derivatives where ``way`` computes an operand from another one."""
    given = list(leaves(case, inputs))
    wanted = [t for t in given if t.requires_grad]
    operands = list(given)
    operands[other] = way(given[one], given[other])
    found = sum(out.sin().sum() for out in results(function, *operands))
    first = torch.autograd.grad(found, wanted, create_graph=True, allow_unused=True)
    again = sum(each.sin().sum() for each in first if each is not None)
    second = torch.autograd.grad(again, wanted, allow_unused=True)
    return [each.detach() for each in (*first, *second) if each is not None]


@every_case
def test_saves_the_least(case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        inputs = sample(case, 16, 32, dtype)
        given = leaves(case, inputs)
        seen: dict[int, Tensor] = {}
        with saved_tensors_hooks(lambda t, seen=seen: seen.setdefault(t.data_ptr(), t), lambda t: t):
            results(case.op, *given)
        assert sum(t.numel() * t.element_size() for t in seen.values()) <= case.saved(*inputs)


@smooth_case
def test_functorch_transforms(case: Case) -> None:
    inputs = sample(case, 3, 4)
    wanted = case.differentiable(inputs)
    stacked = [torch.stack([t, t]) for t in inputs]
    for n in wanted:
        stacked[n][1] += 0.1
    mapped = torch.func.vmap(closed(case))(*stacked)
    for which in range(2):
        expected = results(case.op, *(t[which] for t in stacked))
        torch.testing.assert_close(tuple(t[which] for t in mapped), expected)

    def of_wanted(function: Function) -> Callable[..., Tensor]:
        def total(*given: Tensor) -> Tensor:
            full = list(inputs)
            for n, tensor in zip(wanted, given, strict=True):
                full[n] = tensor
            return sum(out.square().sum() for out in results(function, *full))  # type: ignore[return-value]

        return total

    primals = tuple(inputs[n] for n in wanted)
    positions = tuple(range(len(wanted)))
    torch.testing.assert_close(
        torch.func.grad(of_wanted(case.op), positions)(*primals),
        torch.func.grad(of_wanted(case.eager), positions)(*primals),
    )
    tangents = tuple(torch.ones_like(t) for t in primals)
    torch.testing.assert_close(
        torch.func.jvp(of_wanted(case.op), primals, tangents)[1],
        torch.func.jvp(of_wanted(case.eager), primals, tangents)[1],
    )


@pytest.mark.one_in(10)
@smooth_case
def test_compiles_without_graph_break_at_any_size(case: Case) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(case.op, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, columns in ((3, 8), (5, 6)):
        inputs = sample(case, rows, columns)
        torch.testing.assert_close(run(case, compiled, inputs), run(case, case.op, inputs))


@pytest.mark.one_in(3)
@smooth_case
def test_exports(case: Case) -> None:
    class Model(torch.nn.Module):
        def forward(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
            return results(case.op, *inputs)

    inputs = list(sample(case, 3, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", lambda seed: None)
        program = torch.export.export(Model(), (inputs,))
        torch.testing.assert_close(program.module()(inputs), results(case.op, *inputs))


@every_case
def test_fake_and_meta_tensors(case: Case) -> None:
    from torch._subclasses import FakeTensorMode

    inputs = sample(case, 3, 8, torch.bfloat16)
    expected = run(case, case.op, inputs)
    meta = run(case, case.op, [t.to("meta") for t in inputs])
    with FakeTensorMode() as mode:
        fake = results(case.op, *[mode.from_tensor(t) for t in inputs])
    for seen in (meta, fake):
        for mine, real in zip(seen, expected, strict=False):
            assert (mine.shape, mine.dtype) == (real.shape, real.dtype)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_dtypes_of_eager(case: Case, dtype: torch.dtype) -> None:
    inputs = sample(case, 6, 8, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = run(case, case.op, inputs), run(case, case.eager, inputs)
    assert [t.dtype for t in ours] == [t.dtype for t in eager]
    for mine, theirs in zip(ours, eager, strict=True):
        tolerance = 1e-5 if mine.dtype == torch.float32 and dtype == torch.float32 else 5e-2
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max() + 1))


@every_case
def test_is_deterministic(case: Case) -> None:
    inputs = sample(case, 15, 33, torch.float32)
    first, second = run(case, case.op, inputs), run(case, case.op, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_case
def test_saved_tensors_go_through_hooks(case: Case) -> None:
    inputs = sample(case, 6, 8, torch.float32)
    packed = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal packed
        packed += 1
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda t: t.clone()):
        ours = run(case, case.op, inputs)
    assert packed or not case.saved(*inputs)
    with torch.autograd.graph.save_on_cpu():
        offloaded = run(case, case.op, inputs)
    plain = run(case, case.op, inputs)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, ours, offloaded, strict=True))


@every_case
def test_only_the_gradients_asked_for(case: Case) -> None:
    inputs = sample(case, 3, 8)
    for wanted in case.differentiable(inputs):
        given = [t.clone().requires_grad_(n == wanted) for n, t in enumerate(inputs)]
        outs = [out for out in results(case.op, *given) if out.requires_grad]
        (mine,) = torch.autograd.grad(sum(out.sum() for out in outs), [given[wanted]])
        given = [t.clone().requires_grad_(n == wanted) for n, t in enumerate(inputs)]
        outs = [out for out in results(case.eager, *given) if out.requires_grad]
        (theirs,) = torch.autograd.grad(sum(out.sum() for out in outs), [given[wanted]])
        torch.testing.assert_close(mine, theirs)


@pytest.mark.one_in(12)
@every_case
def test_strides_do_not_matter(case: Case, on_backend: str) -> None:
    inputs = sample(case, 15, 34, torch.float32, on_backend)
    apart = [torch.stack([t, t], -1)[..., 0] if t.is_floating_point() else t for t in inputs]
    turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t for t in inputs]
    for strided in (apart, turned):
        # Dropout draws in the order that numbers have in memory.
        expected = run(case, case.eager, strided) if case.random else run(case, case.op, inputs)
        given = tuple(t.detach().requires_grad_(n in case.differentiable(inputs)) for n, t in enumerate(strided))
        outs = results(case.op, *given)
        generator = torch.Generator().manual_seed(2)
        incoming = [torch.randn(out.shape, dtype=torch.float64, generator=generator).bfloat16() for out in outs]
        gradients = torch.autograd.grad(
            outs, [t for t in given if t.requires_grad], [g.to(out) for g, out in zip(incoming, outs, strict=True)]
        )
        torch.testing.assert_close((*(o.detach() for o in outs), *gradients), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(3)
@every_case
@pytest.mark.parametrize(("rows", "columns"), [(0, 4), (1, 1), (1, 7)])
def test_empty_and_single(case: Case, rows: int, columns: int, on_backend: str) -> None:
    inputs = sample(case, rows, columns, torch.float32, on_backend)
    torch.testing.assert_close(
        run(case, case.op, inputs), run(case, case.eager, inputs), equal_nan=True, rtol=1e-5, atol=1e-5
    )


@pytest.mark.one_in(14)
@pytest.mark.parametrize("case", [case for case in CASES if case.special], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_a_number_and_infinity_propagate_as_in_eager(case: Case, value: float, on_backend: str) -> None:
    inputs = sample(case, *COMPILED, torch.float32, on_backend)
    inputs[0].view(-1)[3] = value
    ours = results(case.op, *inputs)
    # In float64: the float32 kernel of GELU gives NaN for infinity on some machines.
    eager = results(case.eager, *[t.double() if t.is_floating_point() else t for t in inputs])
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(14)
@every_case
def test_inputs_are_never_changed(case: Case, on_backend: str) -> None:
    inputs = sample(case, *COMPILED, torch.float32, on_backend)
    before = [t.clone() for t in inputs]
    results(case.op, *inputs)
    given = leaves(case, inputs)
    torch.autograd.backward([out.sum() for out in results(case.op, *given)])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert all(torch.equal(a.detach(), b) for a, b in zip(given, before, strict=True))
