"""Bias + activation against eager torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

import fused

EAGER = {
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "silu": F.silu,
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
HALVES = (torch.bfloat16, torch.float16)
every_activation = pytest.mark.parametrize("name", EAGER)


def tensors(shape=(6, 5, 33), dtype=torch.float64, spread=2.0):
    torch.manual_seed(0)
    x, g = (spread * torch.randn(shape).to(dtype) for _ in range(2))
    return x, (spread * torch.randn(shape[-1:])).to(dtype), g


@every_activation
def test_equals_eager_within_the_tolerances(name, values_and_gradients):
    x, bias, g = tensors()
    exact = values_and_gradients(lambda x, b: EAGER[name](x + b), g, x, bias)

    def ours(dtype):
        return values_and_gradients(lambda x, b: fused.bias_activation(x, b, name), g, x.to(dtype), bias.to(dtype))

    for mine, truth in zip(ours(torch.float64), exact, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)
    x, bias, g = (t.float() for t in tensors())
    exact = values_and_gradients(lambda x, b: EAGER[name](x + b), g.double(), x.double(), bias.double())
    theirs = values_and_gradients(lambda x, b: EAGER[name](x + b), g, x, bias)
    check_float32(ours(torch.float32), theirs, exact)


def check_float32(ours, theirs, exact):
    """The result and dx within the tolerances, the bias gradient too unless eager torch is no nearer.

    A sum over n rows is off by some √n roundings of its largest partial sum, while its value may cancel to
    nothing: no order of summation stays within a fixed distance, eager's neither. So the sum may be as far off
    as eager's of the same numbers, and never further than the rounding of every addend explains.
    """
    for mine, truth in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1.3e-6, atol=1e-6)
    limit = 1e-6 + 1.3e-6 * exact[2].abs()
    mine, eagers = ((t[2].double() - exact[2]).abs() for t in (ours, theirs))
    assert ((mine <= limit) | (mine <= eagers.max())).all(), f"{mine.max():.3e} against {eagers.max():.3e}"
    addends = exact[1].abs().flatten(0, -2).sum(0)
    assert (mine <= 1e-6 + 1.3e-6 * addends).all()


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_keeps_its_digits_where_it_cancels(name, values_and_gradients):
    """Eager torch does not: its float32 kernels are up to 1.2e-6 and 6e-6 off."""
    x = torch.linspace(-9, 9, 100_001)
    for g in (torch.ones_like(x), torch.full_like(x, 8.0)):
        ours = values_and_gradients(lambda x: fused.bias_activation(x, None, name), g, x)
        exact = values_and_gradients(EAGER[name], g.double(), x.double())
        for mine, truth in zip(ours, exact, strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=1.3e-6, atol=1e-6)


@every_activation
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_no_worse_than_eager(name, dtype, values_and_gradients, assert_no_worse):
    eager = {**EAGER, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}[name]
    x, bias, g = tensors(dtype=dtype)
    exact = values_and_gradients(lambda x, b: eager(x + b), g.double(), x.double(), bias.double())
    theirs = values_and_gradients(lambda x, b: eager(x + b), g, x, bias)
    ours = values_and_gradients(lambda x, b: fused.bias_activation(x, b, name), g, x, bias)
    assert [t.dtype for t in ours] == [dtype] * 3
    assert_no_worse(ours, theirs, exact)


@every_activation
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_gradients_of_both_orders(name, biased):
    x, bias, _ = tensors((2, 3, 4))
    x.requires_grad_()
    inputs = (x, bias.requires_grad_()) if biased else (x,)

    def op(x, bias=None):
        return fused.bias_activation(x, bias, name)

    assert gradcheck(op, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(op, inputs)


def test_the_names_of_megatron_and_huggingface():
    x, bias, _ = tensors()
    tanh = EAGER["gelu_tanh"](x + bias)
    for op in (
        fused.BiasGeLUFunction.apply,
        fused.GeLUFunction.apply,
        fused.bias_gelu_impl,
        fused.bias_gelu,
        fused.bias_new_gelu,
    ):
        torch.testing.assert_close(op(x, bias), tanh, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused.new_gelu(x), EAGER["gelu_tanh"](x), rtol=1e-12, atol=1e-12)
    exact = fused.bias_gelu(x, bias, approximate="none")
    torch.testing.assert_close(exact, F.gelu(x + bias), rtol=1e-12, atol=1e-12)
    assert issubclass(fused.BiasGeLUFunction, torch.autograd.Function)


def test_agrees_with_transformers_activations():
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(fused.new_gelu(x), activations.NewGELUActivation()(x), rtol=1.3e-6, atol=1e-6)
    quick = fused.bias_activation(x, None, "quick_gelu")
    torch.testing.assert_close(quick, activations.ACT2FN["quick_gelu"](x), rtol=1.3e-6, atol=1e-6)
    squared = fused.bias_activation(x, None, "relu2")
    torch.testing.assert_close(squared, activations.ACT2FN["relu2"](x), rtol=1.3e-6, atol=1e-6)


@every_activation
def test_wrong_variants_are_told_apart(name):
    """The tolerance of these tests catches each mutation: another activation, no bias, a doubled bias."""
    x, bias, _ = tensors()
    right = EAGER[name](x + bias)
    wrong = [EAGER[other](x + bias) for other in EAGER if other != name]
    for mutant in [*wrong, EAGER[name](x), EAGER[name](x + 2 * bias)]:
        assert not torch.allclose(fused.bias_activation(x, bias, name), mutant, rtol=1e-6, atol=1e-6)
    assert torch.allclose(fused.bias_activation(x, bias, name), right, rtol=1e-12, atol=1e-12)


def test_half_x_with_a_float_bias_gives_float(values_and_gradients):
    x, bias, g = tensors(dtype=torch.bfloat16)
    out, dx, dbias = values_and_gradients(fused.bias_gelu, g, x, bias.float())
    assert (out.dtype, dx.dtype, dbias.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, F.gelu(x.float() + bias.float(), approximate="tanh"))


@every_activation
def test_saves_one_tensor_and_the_bias(name, saved_bytes):
    x, bias, _ = tensors(dtype=torch.float32)
    x.requires_grad_()
    inputs = x.numel() * 4 + bias.numel() * 4
    assert saved_bytes(lambda: fused.bias_activation(x, bias, name)) == inputs
    if name == "gelu_tanh":
        assert saved_bytes(lambda: EAGER[name](x + bias)) > 2 * inputs


@every_activation
@pytest.mark.parametrize(
    ("dtype", "saving_it"), [(torch.float32, ("relu", "tanh", "sigmoid")), (torch.bfloat16, ("relu",))], ids=str
)
def test_a_result_that_gives_the_gradient_is_saved_which_the_next_layer_saves_too(name, dtype, saving_it, saved_bytes):
    x, bias, _ = tensors(dtype=dtype)
    x.requires_grad_()
    weight = torch.randn(4, 33, dtype=dtype)

    def two_layers():
        return F.linear(fused.bias_activation(x, bias, name), weight.requires_grad_())

    numbers = x.numel() * (1 if name in saving_it else 2) + bias.numel() + weight.numel()
    assert saved_bytes(two_layers) == numbers * dtype.itemsize


@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid"])
def test_a_saved_result_of_another_dtype(name, values_and_gradients, assert_no_worse):
    x, bias, g = tensors(dtype=torch.bfloat16)
    bias = bias.float()
    ours = values_and_gradients(lambda x, b: fused.bias_activation(x, b, name), g, x, bias)
    theirs = values_and_gradients(lambda x, b: EAGER[name](x + b), g, x, bias)
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16, torch.float32]
    assert_no_worse(ours, theirs, values_and_gradients(lambda x, b: EAGER[name](x + b), g, x.double(), bias.double()))


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 1, 3, 2, 7), (0, 7), (4, 0), (1, 1)])
def test_any_rank_and_empty_tensors(shape, values_and_gradients):
    x, bias, g = tensors(shape)
    ours = values_and_gradients(fused.bias_gelu, g, x, bias)
    theirs = values_and_gradients(lambda x, b: F.gelu(x + b, approximate="tanh"), g, x, bias)
    torch.testing.assert_close(ours, theirs)


def test_strides_do_not_matter():
    x, bias, _ = tensors((6, 5, 4))
    view = x.permute(2, 1, 0)[::2, :, ::3]
    short = bias.new_ones(8)[::4]
    torch.testing.assert_close(fused.bias_gelu(view, short), F.gelu(view + short, approximate="tanh"))


@every_activation
def test_not_a_number_and_infinity_propagate_as_in_eager(name):
    eager = {**EAGER, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}[name]
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    # In float64: the float32 kernel of GELU gives NaN for infinity on some machines.
    expected = eager(x.double()).float()
    torch.testing.assert_close(fused.bias_activation(x, None, name), expected, equal_nan=True)


def test_functorch_transforms():
    x, bias, _ = tensors((3, 4, 5))
    for op in (fused.bias_gelu, fused.BiasGeLUFunction.apply):
        mapped = torch.func.vmap(op, in_dims=(0, None))(x, bias)
        torch.testing.assert_close(mapped, op(x, bias))
        _, tangent = torch.func.jvp(op, (x, bias), (torch.ones_like(x), torch.zeros_like(bias)))
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(op(leaf, bias).sum(), leaf)
        torch.testing.assert_close(tangent, gradient)
        functional = torch.func.grad(lambda x, op=op: op(x, bias).sum())(x)
        torch.testing.assert_close(functional, gradient)


@pytest.mark.parametrize("op", [fused.bias_gelu, fused.BiasGeLUFunction.apply, fused.bias_new_gelu])
def test_compiles_without_graph_break_at_any_size(op, values_and_gradients):
    def wrapped(x, b):
        return op(x, b) * 2

    torch._dynamo.reset()
    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 3, 8), (4, 5, 6)):
        x, bias, g = tensors(shape)
        torch.testing.assert_close(
            values_and_gradients(compiled, g, x, bias), values_and_gradients(wrapped, g, x, bias)
        )


def test_fake_and_meta_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        out = fused.bias_gelu(torch.empty(2, 3, dtype=torch.bfloat16), torch.empty(3))
        assert out.shape == (2, 3) and out.dtype == torch.float32
    x = torch.empty(2, 3, device="meta", requires_grad=True)
    fused.bias_gelu(x, torch.empty(3, device="meta")).sum().backward()
    assert x.grad is not None and x.grad.device.type == "meta"


def test_autocast_gives_the_dtypes_of_eager(values_and_gradients):
    x, bias, g = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = values_and_gradients(fused.bias_gelu, g, x, bias)
        theirs = values_and_gradients(lambda x, b: F.gelu(x + b, approximate="tanh"), g, x, bias)
    torch.testing.assert_close(ours, theirs, rtol=1.3e-6, atol=1e-5)


def test_is_deterministic(values_and_gradients):
    x, bias, g = tensors(dtype=torch.float32)
    first, second = (values_and_gradients(fused.bias_gelu, g, x, bias) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_only_the_gradients_asked_for():
    x, bias, _ = tensors()
    bias.requires_grad_()
    fused.bias_gelu(x, bias).sum().backward()
    assert x.grad is None and bias.grad is not None


def test_saved_tensors_go_through_hooks():
    x, bias, _ = tensors(dtype=torch.float32)
    x.requires_grad_()
    with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        out = fused.bias_gelu(x, bias)
    (packed,) = torch.autograd.grad(out.sum(), x)
    (plain,) = torch.autograd.grad(fused.bias_gelu(x, bias).sum(), x)
    assert torch.equal(packed, plain)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(2, 3), torch.ones(4), "relu"), ValueError, r"\[3\].*\[2, 3\].*\[4\]"),
        ((torch.ones(2, 3), torch.ones(1, 3), "relu"), ValueError, r"\[1, 3\]"),
        ((torch.ones(()), None, "relu"), ValueError, "at least 1 dimension"),
        ((torch.ones(2, 3), torch.ones(3), "swish"), ValueError, "swish.*relu.*silu"),
        ((torch.ones(2, 3, dtype=torch.int64), None, "relu"), TypeError, r"int64 of shape \[2, 3\]"),
        ((torch.ones(2, 3), torch.ones(3, dtype=torch.int64), "relu"), TypeError, "bias.*int64"),
        ((torch.ones(2, 3), torch.ones(3, device="meta"), "relu"), ValueError, "on meta.*on cpu"),
        (([1.0], None, "relu"), TypeError, "list"),
    ],
)
def test_bad_input(arguments, error, text):
    with pytest.raises(error, match=text):
        fused.bias_activation(*arguments)


def test_bad_approximation():
    with pytest.raises(ValueError, match="'tanh' or 'none', got 'erf'"):
        fused.bias_gelu(torch.ones(2), None, approximate="erf")


def eager_weighted(x, weights):
    return (F.relu(x).square() * weights).to(x.dtype)


def test_weighted_squared_relu(values_and_gradients, assert_no_worse, saved_bytes):
    x, _, g = tensors((6, 5, 33))
    weights = torch.rand(6, 5, 1, dtype=torch.float64)
    ours = values_and_gradients(fused.weighted_squared_relu, g, x, weights)
    exact = values_and_gradients(eager_weighted, g, x, weights)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)

    half = [t.bfloat16() for t in (g, x, weights)]
    exact = values_and_gradients(eager_weighted, *[t.double() for t in half])
    assert_no_worse(
        values_and_gradients(fused.weighted_squared_relu, *half),
        values_and_gradients(eager_weighted, *half),
        exact,
    )
    out, dx, dweights = values_and_gradients(fused.weighted_squared_relu, half[0], half[1], weights.float())
    assert (out.dtype, dx.dtype, dweights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)

    small = [t[:2, :2, :3].clone().requires_grad_() for t in (x, weights)]
    assert gradcheck(fused.weighted_squared_relu, small, check_forward_ad=True)
    assert gradgradcheck(fused.weighted_squared_relu, small)
    bytes_ = sum(t.numel() * t.element_size() for t in small)
    assert saved_bytes(lambda: fused.weighted_squared_relu(*small)) == bytes_
    mapped = torch.func.vmap(fused.weighted_squared_relu)(x, weights)
    torch.testing.assert_close(mapped, eager_weighted(x, weights))


def test_weighted_squared_relu_compiles_without_graph_break(values_and_gradients):
    x, _, g = tensors((6, 5, 33))
    weights = torch.rand(6, 5, 1, dtype=torch.float64)
    compiled = torch.compile(fused.weighted_squared_relu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        values_and_gradients(compiled, g, x, weights), values_and_gradients(eager_weighted, g, x, weights)
    )


def test_weighted_squared_relu_refuses_other_weights():
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 3\]"):
        fused.weighted_squared_relu(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"weights.*int64"):
        fused.weighted_squared_relu(torch.ones(2, 3), torch.ones(2, 1, dtype=torch.int64))
