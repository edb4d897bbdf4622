"""What is special to bias + dropout + residual; the rest is in the table of `cases_bias_dropout.py`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused
from fused.bias_dropout import BIAS_DROPOUT

Tensor = torch.Tensor


def under_seed(function, *args):
    torch.manual_seed(3)
    out = function(*args)
    return out, torch.rand(2)


@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.9, 1.0])
def test_the_mask_is_eagers_and_so_is_the_generator_after_it(backend, dtype, p, warm_inductor):
    x, bias = torch.rand(65, 33).to(dtype) + 1, torch.rand(33).to(dtype)
    with fused.backend(backend):
        ours = under_seed(fused.bias_dropout, x, bias, p)
    eager = under_seed(lambda: F.dropout(x + bias, p))
    assert torch.equal(ours[0] == 0, eager[0] == 0)
    assert torch.equal(ours[1], eager[1])


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2), (2, 1, 0), (0, 1, 2)])
def test_the_mask_is_eagers_for_permuted_inputs(order):
    x = torch.rand(5, 6, 7).permute(order) + 1
    for given in (x, x[:, ::2], x[..., ::2], x[:1].expand(4, -1, -1)):
        bias, residual = torch.rand(given.shape[-1]), torch.zeros(given.shape)
        ours, _ = under_seed(fused.bias_dropout_add, given, bias, residual, 0.5)
        eager, _ = under_seed(lambda given=given, bias=bias: F.dropout(given + bias, 0.5))
        assert torch.equal(ours == 0, eager == 0)


@pytest.mark.parametrize("fused_op", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_megatrons_function(fused_op, training, with_bias):
    x, residual = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    bias = torch.randn(8) if with_bias else None
    add = fused.get_bias_dropout_add(training, fused_op)
    out, _ = under_seed(add, (x, bias), residual, 0.5)
    z = x if bias is None else x + bias
    expected, _ = under_seed(lambda: residual + F.dropout(z, 0.5, training))
    torch.testing.assert_close(out, expected)


def test_16_bit_input_with_float32_residual_gives_float32_and_own_gradient_dtypes():
    x, bias = torch.randn(6, 8).bfloat16().requires_grad_(), torch.randn(8).bfloat16().requires_grad_()
    residual = torch.randn(6, 8, requires_grad=True)
    out, _ = under_seed(fused.bias_dropout_add, x, bias, residual, 0.5)
    assert out.dtype == torch.float32
    g = torch.randn(6, 8)
    out.backward(g)
    assert [t.grad.dtype for t in (x, bias, residual)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    kept = under_seed(lambda: F.dropout(torch.ones(6, 8), 0.5))[0]
    torch.testing.assert_close(out, residual + kept * (x.float() + bias.float()))
    assert torch.equal(residual.grad, g)
    torch.testing.assert_close(bias.grad, (g * kept).sum(0).bfloat16())


def test_saves_one_byte_an_element_and_nothing_without_dropout(saved_bytes):
    x, bias, residual = torch.randn(64, 32, requires_grad=True), torch.randn(32), torch.randn(64, 32)
    assert saved_bytes(lambda: fused.bias_dropout_add(x, bias, residual, 0.5)) == 64 * 32
    assert saved_bytes(lambda: fused.bias_dropout_add(x, bias, residual, 0.5, training=False)) == 0
    assert saved_bytes(lambda: fused.bias_dropout_add(x, bias, residual, 0.0)) == 0


@pytest.mark.parametrize("training", [True, False])
def test_never_writes_to_what_others_may_read(training):
    x, bias, residual = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8)
    view, before = x.view(-1), [t.clone() for t in (x, bias, residual)]
    for bias_or_none in (bias, None):
        out = fused.bias_dropout_add(x, bias_or_none, residual, 0.0, training)
        assert out.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in (x, residual)}
    assert all(torch.equal(a, b) for a, b in zip((x, bias, residual), before, strict=True))
    assert torch.equal(view, before[0].view(-1))


def test_dropped_infinite_gradients_are_nan_as_in_eager():
    x, g = torch.randn(8, 8), torch.full((8, 8), torch.inf)
    gradients = []
    for op in (lambda x: fused.bias_dropout(x, None, 0.5), lambda x: F.dropout(x, 0.5)):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(under_seed(op, leaf)[0], leaf, g)[0])
    torch.testing.assert_close(*gradients, equal_nan=True)
    assert gradients[0].isnan().any() and gradients[0].isinf().any()


@pytest.mark.parametrize("shape", [(1, 8), (3, 1, 8), (3, 4, 8), (1,), (4, 1)])
def test_a_bias_may_be_anything_that_broadcasts(shape):
    x, residual = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    bias = torch.randn(shape, requires_grad=True)
    out, _ = under_seed(fused.bias_dropout_add, x, bias, residual, 0.5)
    expected, _ = under_seed(lambda: residual + F.dropout(x + bias, 0.5))
    torch.testing.assert_close(out, expected)
    g = torch.randn(out.shape)
    mine, theirs = (torch.autograd.grad(result, bias, g)[0] for result in (out, expected))
    torch.testing.assert_close(mine, theirs)


def test_evaluation_and_zero_dropout_draw_nothing():
    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    for p, training in ((0.0, True), (0.5, False)):
        state = torch.get_rng_state()
        torch.testing.assert_close(fused.bias_dropout_add(x, None, residual, p, training), x + residual)
        assert torch.equal(state, torch.get_rng_state())


def test_compiled_without_graph_break_drops_the_right_share():
    op = torch.compile(lambda x, b, r: fused.bias_dropout_add(x, b, r, 0.25), fullgraph=True, backend="aot_eager")
    x = torch.ones(200, 200, requires_grad=True)
    out = op(x, torch.ones(200), torch.zeros(200, 200))
    assert 0.23 < (out == 0).float().mean() < 0.27
    torch.testing.assert_close(out[out != 0].unique(), torch.tensor([2 / 0.75]))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * 2, out)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(4, 8), None, torch.ones(4, 7), 0.1), ValueError, r"residual \[4, 7\].*\[4, 8\]"),
        ((torch.ones(4, 8), torch.ones(7), torch.ones(4, 8), 0.1), ValueError, r"bias \[7\]"),
        ((torch.ones(4, 8), None, torch.ones(4, 8), 1.5), ValueError, "between 0 and 1, got 1.5"),
        ((torch.ones(4, 8), None, torch.ones(4, 8).int(), 0.1), TypeError, "residual must be"),
        ((torch.ones(4, 8).int(), None, torch.ones(4, 8), 0.1), TypeError, "input must be"),
        ((torch.ones(4, 8), None, torch.ones(4, 8, device="meta"), 0.1), ValueError, "is on meta"),
    ],
)
def test_errors_name_the_shapes(arguments, error, words):
    with pytest.raises(error, match=f"bias_dropout_add: .*{words}"):
        fused.bias_dropout_add(*arguments)


def compare_with_eager():
    x, bias, residual = (t.requires_grad_() for t in (torch.randn(6, 8), torch.randn(8), torch.randn(6, 8)))
    g, results = torch.randn(6, 8), []
    for op in (
        lambda: fused.bias_dropout_add(x, bias, residual, 0.25),
        lambda: residual + F.dropout(x + bias, 0.25),
    ):
        out, _ = under_seed(op)
        results.append((out, *torch.autograd.grad(out, (x, bias, residual), g)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("forward", lambda f, x, b, r, k, s: f(x, None, r, k, s)),
        ("forward", lambda f, x, b, r, k, s: f(x, b, None, k, s)),
        ("forward", lambda f, x, b, r, k, s: f(x, b, r, ~k, s)),
        ("forward", lambda f, x, b, r, k, s: f(x, b, r, k, 1.0)),
        ("forward", lambda f, x, b, r, k, s: f(r, b, x, k, s)),
        ("backward", lambda f, g, k, s, **dtypes: f(g, None, s, **dtypes)),
        ("backward", lambda f, g, k, s, **dtypes: f(g, k, 1.0, **dtypes)),
        ("backward", lambda f, g, k, s, **dtypes: tuple(2 * d for d in f(g, k, s, **dtypes))),
    ],
)
def test_wrong_variants_are_told_apart(monkeypatch, part, change):
    compare_with_eager()
    right = getattr(BIAS_DROPOUT, part)
    monkeypatch.setattr(BIAS_DROPOUT, part, lambda *args, **statics: change(right, *args, **statics))
    with pytest.raises(AssertionError, match="not close"):
        compare_with_eager()
