"""What is special to bias + activation; the rest is in test_quality."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused
from fused.backends.compiled import mish_pair
from tests.fused.cases_activations import EAGER

every_activation = pytest.mark.parametrize("name", EAGER)


def tensors(shape=(6, 5, 33), dtype=torch.float64, spread=2.0):
    torch.manual_seed(0)
    x, g = (spread * torch.randn(shape).to(dtype) for _ in range(2))
    return x, (spread * torch.randn(shape[-1:])).to(dtype), g


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_keeps_its_digits_where_it_cancels(name, values_and_gradients):
    """Eager torch does not: its float32 kernels are up to 1.2e-6 and 6e-6 off."""
    x = torch.linspace(-9, 9, 100_001)
    for g in (torch.ones_like(x), torch.full_like(x, 8.0)):
        ours = values_and_gradients(lambda x: fused.bias_activation(x, None, name), g, x)
        exact = values_and_gradients(EAGER[name], g.double(), x.double())
        for mine, truth in zip(ours, exact, strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=1.3e-6, atol=1e-6)


def test_mish_from_one_exponential():
    """For numbers whose exponential overflows, too."""
    for dtype, spread, tolerance in ((torch.float64, 800, 1e-14), (torch.float32, 100, 3e-6)):
        x = torch.linspace(-spread, spread, 100_001, dtype=dtype)
        exact = x.double().requires_grad_()
        expected = F.mish(exact)
        (slope,) = torch.autograd.grad(expected.sum(), exact)
        for mine, truth in zip(mish_pair(x), (expected, slope), strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=tolerance, atol=tolerance)


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
@pytest.mark.parametrize(
    ("dtype", "saving_it"),
    [(torch.float32, ("relu", "relu6", "tanh", "sigmoid")), (torch.bfloat16, ("relu", "relu6"))],
    ids=str,
)
def test_a_result_that_gives_the_gradient_is_saved_which_the_next_layer_saves_too(name, dtype, saving_it, saved_bytes):
    x, bias, _ = tensors(dtype=dtype)
    x.requires_grad_()
    weight = torch.randn(4, 33, dtype=dtype)

    def two_layers():
        return F.linear(fused.bias_activation(x, bias, name), weight.requires_grad_())

    numbers = x.numel() * (1 if name in saving_it else 2) + bias.numel() + weight.numel()
    assert saved_bytes(two_layers) == numbers * dtype.itemsize


@pytest.mark.parametrize("name", ["relu", "relu6", "tanh", "sigmoid"])
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


def test_weighted_squared_relu_refuses_other_weights():
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 3\]"):
        fused.weighted_squared_relu(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"weights.*int64"):
        fused.weighted_squared_relu(torch.ones(2, 3), torch.ones(2, 1, dtype=torch.int64))
