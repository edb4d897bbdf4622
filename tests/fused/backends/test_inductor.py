"""The compiled backend: the reference's results, one compilation a kind of input, and failures."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import fused
from fused.backends import availability, inductor, kernels

pytestmark = pytest.mark.usefixtures("warm_inductor")


@pytest.fixture
def compilations():
    """The number of kernels compiled or loaded since the last call."""

    def known() -> int:
        return sum(map(len, kernels._kernels.values()))

    seen = known()

    def count() -> int:
        nonlocal seen
        before, seen = seen, known()
        return seen - before

    return count


@pytest.fixture(autouse=True)
def nothing_broken():
    availability.forget()
    yield
    assert not availability._broken
    availability.forget()


def both(run, *arguments):
    with fused.backend("inductor"):
        compiled = run(*arguments)
    with fused.backend("reference"):
        return compiled, run(*arguments)


def test_bias_gelu_at_many_shapes_with_two_compilations(values_and_gradients, compilations):
    for shape in ((3, 5, 33), (4, 2, 6, 7), (9, 64), (2, 3)):
        torch.manual_seed(0)
        x, g, bias = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
        torch.testing.assert_close(*both(values_and_gradients, fused.bias_gelu, g, x, bias))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(*both(values_and_gradients, fused.bias_gelu, g, x, bias))
    assert compilations() <= 2
    strided = torch.randn(6, 4, 5).transpose(0, 1)
    torch.testing.assert_close(*both(fused.bias_gelu, strided, torch.randn(10)[::2]))
    assert compilations() == 0


def test_half_x_with_a_float_bias(values_and_gradients):
    x, g, bias = torch.randn(6, 33).bfloat16(), torch.randn(6, 33), torch.randn(33)
    compiled, reference = both(values_and_gradients, fused.bias_gelu, g, x, bias)
    assert [t.dtype for t in compiled] == [torch.float32, torch.bfloat16, torch.float32]
    torch.testing.assert_close(compiled, reference)


def test_masked_softmax_with_everything(values_and_gradients, compilations):
    def op(x, mask, sink, scale):
        torch.manual_seed(3)
        return fused.scaled_masked_softmax(x, mask, scale, causal=True, window=(5, 0), sink=sink, dropout_p=0.3)

    for scale, shape in ((0.5, (2, 3, 7, 9)), (0.25, (3, 2, 9, 17)), (1 / math.sqrt(80), (4, 5, 6, 8))):
        x, g, sink = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
        mask = torch.randn(1, *shape[1:])
        compiled, reference = both(values_and_gradients, partial(op, scale=scale), g, x, mask, sink)
        assert torch.equal(compiled[0] == 0, reference[0] == 0)
        torch.testing.assert_close(compiled, reference)
    # Recompiled once at most for what two sizes that happen to be equal had led to.
    assert compilations() <= 4


def test_boolean_masks_and_hidden_rows(values_and_gradients):
    x, g = torch.randn(2, 3, 7, 9), torch.randn(2, 3, 7, 9)
    hidden = torch.rand(2, 1, 7, 9) < 0.4
    hidden[0, 0, 2] = True
    expanded = hidden.expand(-1, 3, -1, -1)
    for mask in (hidden, expanded):
        compiled, reference = both(values_and_gradients, lambda x, m=mask: fused.scaled_masked_softmax(x, m, 0.5), g, x)
        torch.testing.assert_close(compiled, reference)
        assert (compiled[0][0, :, 2] == 0).all()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations_keep_float32_s_digits(activation, values_and_gradients):
    torch.manual_seed(0)
    x, g, bias = 2 * torch.randn(500, 65), 2 * torch.randn(500, 65), 2 * torch.randn(65)

    def eager(x, bias):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return torch.nn.functional.gelu(x + bias, approximate=approximate)

    exact = values_and_gradients(eager, g.double(), x.double(), bias.double())
    theirs = values_and_gradients(eager, g, x, bias)
    with fused.backend("inductor"):
        ours = values_and_gradients(lambda x, b: fused.bias_activation(x, b, activation), g, x, bias)
    for mine, truth in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1.3e-6, atol=1e-6)
    # Beyond the tolerance, as eager's sum of 500 rows is: no further off than that one.
    errors = [(t[2].double() - exact[2]).abs().max() for t in (ours, theirs)]
    assert errors[0] <= errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_softmax_is_no_worse_than_eager(dtype, values_and_gradients, assert_no_worse):
    torch.manual_seed(0)
    x, g = (3 * torch.randn(2, 3, 40, 65)).to(dtype), torch.randn(2, 3, 40, 65).to(dtype)

    def eager(x):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return torch.softmax(x * 0.125, -1, dtype=wide).to(x.dtype)

    with fused.backend("inductor"):
        ours = values_and_gradients(lambda x: fused.scaled_masked_softmax(x, None, 0.125), g, x)
    exact = values_and_gradients(eager, g.double(), x.double())
    assert_no_worse(ours, values_and_gradients(eager, g, x), exact)


def test_under_no_grad_inference_mode_and_saved_tensor_hooks():
    x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    expected = fused.bias_gelu(x, bias).detach()
    with fused.backend("inductor"):
        with torch.no_grad():
            torch.testing.assert_close(fused.bias_gelu(x, bias), expected)
        with torch.inference_mode():
            torch.testing.assert_close(fused.bias_gelu(x, bias), expected)
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            out = fused.bias_gelu(x, bias)
        out.sum().backward()
    assert x.grad is not None


def test_double_backward_goes_to_the_reference():
    x = torch.randn(3, 5, requires_grad=True)
    with fused.backend("inductor"):
        (first,) = torch.autograd.grad(fused.new_gelu(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    tanh = torch.nn.functional.gelu(x, approximate="tanh").sum()
    (first,) = torch.autograd.grad(tanh, x, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.sum(), x)[0])


def test_inside_of_a_compiled_function_and_a_transform():
    x, bias = torch.randn(4, 8), torch.randn(8)
    with fused.backend("inductor"):
        compiled = torch.compile(lambda x: fused.bias_gelu(x, bias) + 1, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), fused.bias_gelu(x, bias) + 1)
        mapped = torch.func.vmap(fused.bias_gelu, in_dims=(0, None))(x, bias)
        torch.testing.assert_close(mapped, fused.bias_gelu(x, bias))


def test_a_failing_compiler_is_said_once_and_the_reference_runs(monkeypatch):
    def broken(*args):
        raise OSError("the compiler is out of order")

    monkeypatch.setattr(kernels, "_found", broken)
    monkeypatch.setattr(kernels, "_by_sizes", {})
    x = torch.randn(4, 8)
    expected = fused.new_gelu(x)
    warning = pytest.warns(RuntimeWarning, match=r"out of order.*reference backend.*CXX")
    with warning as seen, fused.backend("inductor"):
        for _ in range(2):
            torch.testing.assert_close(fused.new_gelu(x), expected)
    with fused.backend("auto"):
        assert "out of order" in fused.backends("cpu")["bias_activation"].reason
    assert len(seen) == 1
    availability.forget()


def test_sizes_beyond_the_last_kernel_run_uncompiled(monkeypatch):
    monkeypatch.setattr(kernels, "MAX_KERNELS", 1)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_by_sizes", {})
    square, oblong = torch.randn(5, 5), torch.randn(5, 6)
    with pytest.warns(RuntimeWarning, match="recompiled too often"):
        for x in (square, oblong, oblong, square):
            torch.testing.assert_close(inductor.run(torch.neg, [x], {}, "cpu"), -x)
    assert [len(known) for known in kernels._kernels.values()] == [1]


def test_other_devices_are_compiled_by_torch(monkeypatch):
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def limit(*inputs):
        raise FailOnRecompileLimitHit("8")

    x = torch.randn(3, 4)
    monkeypatch.setattr(inductor, "_compiled", {})
    torch.testing.assert_close(inductor.run(torch.neg, [x], {}, "cuda"), -x)
    assert len(inductor._compiled) == 1
    monkeypatch.setattr(inductor, "_compiled", {})
    monkeypatch.setattr(inductor, "_specialize", lambda formula, statics: limit)
    with pytest.warns(RuntimeWarning, match="recompiled too often"):
        for _ in range(2):
            torch.testing.assert_close(inductor.run(torch.neg, [x], {}, "cuda"), -x)


def test_errors_of_the_caller_come_out_as_themselves():
    with pytest.raises(RuntimeError, match="size of tensor"):
        inductor.run(torch.add, [torch.ones(2), torch.ones(3)], {}, "cpu")


class Watching(TorchFunctionMode):
    """Notes what is called, as a recording does."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def test_function_modes_see_nothing_of_compiled_code():
    """A recording notes what a module calls, not what the compiler does."""
    with Watching() as watching:
        assert torch.equal(inductor.run(torch.add, [torch.ones(2), torch.ones(2)], {}, "cpu"), torch.full((2,), 2.0))
    assert torch.add not in watching.seen and torch.equal in watching.seen
