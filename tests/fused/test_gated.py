"""What is special to the gated activations; the quality lines are in the table of `cases_gated.py`."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fused
from fused.gated_autograd import GATED_ACTIVATION, restored, stored
from tests.fused.cases_activations import EAGER

FAMILIES = {"swiglu": "silu", "geglu": "gelu_tanh", "reglu": "relu", "quick_geglu": "quick_gelu"}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_activation = pytest.mark.parametrize("name", EAGER)


def tensors(shape=(6, 5, 34), dtype=torch.float64):
    """y, bias, weights and the incoming gradient."""
    torch.manual_seed(0)
    y = 2 * torch.randn(shape, dtype=torch.float64)
    bias, weights = torch.randn(shape[-1], dtype=torch.float64), torch.rand(*shape[:-1], 1, dtype=torch.float64)
    g = torch.randn(*shape[:-1], shape[-1] // 2, dtype=torch.float64)
    return [t.to(dtype) for t in (y, bias, weights, g)]


def eager(activation, y):
    gate, up = y.chunk(2, -1)
    return EAGER[activation](gate) * up


@every_family
def test_all_four_forms(family, values_and_gradients):
    y, bias, weights, g = tensors()
    name = FAMILIES[family]
    forms = [
        (family, lambda y: eager(name, y), (y,)),
        (f"bias_{family}", lambda y, b: eager(name, y + b), (y, bias)),
        (f"weighted_{family}", lambda y, w: eager(name, y) * w, (y, weights)),
        (f"weighted_bias_{family}", lambda y, b, w: eager(name, y + b) * w, (y, bias, weights)),
    ]
    for form, expected, inputs in forms:
        ours = values_and_gradients(getattr(fused, form), g, *inputs)
        theirs = values_and_gradients(expected, g, *inputs)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda m, form=form: f"{form}: {m}")
    torch.testing.assert_close(getattr(fused, f"bias_{family}")(y, None), eager(name, y), rtol=1e-12, atol=1e-12)


@every_activation
def test_wrong_variants_are_told_apart(name):
    """The tolerances catch another activation, swapped halves, no up, and a weight or an offset left out."""
    y, _, weights, _ = tensors()
    gate, up = (3 * y).chunk(2, -1)  # beyond 6 too
    ours = fused.gated_activation(gate, up, name, weights=weights, linear_offset=0.5)
    wrong = [EAGER[other](gate) * (up + 0.5) * weights for other in EAGER if other != name]
    act = EAGER[name]
    wrong += [act(up) * (gate + 0.5) * weights, act(gate) * weights, act(gate) * (up + 0.5), act(gate) * up * weights]
    for mutant in wrong:
        assert not torch.allclose(ours, mutant, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours, act(gate) * (up + 0.5) * weights, rtol=1e-12, atol=1e-12)


def test_megatrons_functions_and_implementations(values_and_gradients):
    y, bias, weights, g = tensors()
    offset = torch.tensor(1.0)
    calls = [
        (lambda y: fused.SwiGLUFunction.apply(y, False, False), fused.swiglu, (y,)),
        (lambda y, b: fused.BiasSwiGLUFunction.apply(y, b, False, False), fused.bias_swiglu, (y, bias)),
        (lambda y, w: fused.WeightedSwiGLUFunction.apply(y, w, False), fused.weighted_swiglu, (y, weights)),
        (fused.GeGLUFunction.apply, fused.geglu, (y,)),
        (fused.BiasGeGLUFunction.apply, fused.bias_geglu, (y, bias)),
        (
            lambda y, w: fused.WeightedQuickGeGLUFunction.apply(y, w, False, offset),
            lambda y, w: fused.weighted_quick_geglu(y, w, 1.0),
            (y, weights),
        ),
        (
            lambda y, b, w: fused.WeightedBiasQuickGeGLUFunction.apply(y, b, w, False, offset),
            lambda y, b, w: fused.weighted_bias_quick_geglu(y, b, w, 1.0),
            (y, bias, weights),
        ),
        (fused.bias_swiglu_impl, fused.bias_swiglu, (y, bias)),
        (lambda y: fused.bias_swiglu_impl(y, None, clamp_value=1.0), lambda y: fused.swiglu(y, clamp_value=1.0), (y,)),
        (lambda y, w: fused.weighted_bias_swiglu_impl(y, None, w), fused.weighted_swiglu, (y, weights)),
        (fused.bias_geglu_impl, fused.bias_geglu, (y, bias)),
        (
            lambda y, b, w: fused.weighted_bias_quick_geglu_impl(y, b, w, False, 1.0, 7.0),
            lambda y, b, w: fused.weighted_bias_quick_geglu(y, b, w, 1.0, clamp_value=7.0),
            (y, bias, weights),
        ),
    ]
    for theirs, ours, inputs in calls:
        assert all(map(torch.equal, values_and_gradients(theirs, g, *inputs), values_and_gradients(ours, g, *inputs)))
    torch.testing.assert_close(fused.quick_gelu(y), y * torch.sigmoid(1.702 * y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fp8", [False, True])
def test_megatrons_functions_compile_without_graph_break(values_and_gradients, fp8):
    y, bias, weights, g = tensors((3, 8), torch.float32)
    torch._dynamo.reset()
    for op, inputs in (
        (lambda y, b: fused.BiasSwiGLUFunction.apply(y, b, fp8, False), (y, bias)),
        (lambda y, w: fused.WeightedQuickGeGLUFunction.apply(y, w, fp8, 1.0), (y, weights)),
        (lambda y, w: fused.weighted_swiglu(y, w, fp8_input_store=fp8), (y, weights)),
    ):
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(
            values_and_gradients(compiled, g, *inputs), values_and_gradients(op, g, *inputs), rtol=1e-5, atol=1e-6
        )


def test_offloading_marks_what_is_saved():
    y, bias, _, _ = tensors((4, 8), torch.float32)
    y.requires_grad_()
    for fp8 in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
            fused.bias_swiglu_impl(y, bias, fp8, True)
        assert [getattr(t, "activation_offloading", False) for t in saved[:2]] == [True, True]
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        fused.bias_swiglu_impl(y.detach().clone().requires_grad_(), None)
    assert not hasattr(saved[-1], "activation_offloading")


def test_a_clamp_cuts_after_the_bias_and_has_the_gradient_of_torch_at_its_limit(values_and_gradients):
    gate = torch.tensor([-9.0, 1.0, 2.0, 2.5, math.nan], dtype=torch.float64)
    up = torch.tensor([1.0, -2.0, 2.0, 9.0, 1.0], dtype=torch.float64)
    y, bias = torch.cat((gate, up)), torch.full((10,), 0.5, dtype=torch.float64)
    out, dy, dbias = values_and_gradients(
        lambda y, b: fused.bias_quick_geglu(y, b, 1.0, clamp_value=2.0), torch.ones(5), y - bias, bias
    )
    cut, low = gate.clamp(max=2), up.clamp(-2, 2)
    torch.testing.assert_close(out, cut * torch.sigmoid(1.702 * cut) * (low + 1), equal_nan=True)
    limits = torch.cat((gate, up)).requires_grad_()
    (passes,) = torch.autograd.grad(torch.cat((limits[:5].clamp(max=2), limits[5:].clamp(-2, 2))).sum(), limits)
    assert [number != 0 for number in dy[:9]] == [number != 0 for number in passes[:9]]
    assert passes[1] and not passes[3]
    torch.testing.assert_close(dbias, dy, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-4, 3e4])
def test_8_bits_keep_tensors_of_any_size(dtype, size):
    """Without a scale, 1e-4 would become 0 and 3e4 NaN."""
    x = size * torch.linspace(-1, 1, 1001).to(dtype)
    bits, scale = stored(x)
    assert bits.dtype == torch.float8_e4m3fn and scale.shape == ()
    near = (restored(bits, scale, dtype) - x).abs()
    assert (near <= x.abs() / 16 + size * 2**-15).all()
    assert restored(bits, scale, dtype).abs().max() == x.abs().max()


def test_8_bits_of_zeros_nothing_infinities_and_nan():
    for x in (torch.zeros(3), torch.ones(0, 4), torch.full((2,), 1e-44)):
        assert restored(*stored(x), x.dtype).shape == x.shape
        assert restored(*stored(x), x.dtype).isfinite().all()
    x = torch.tensor([1.0, math.inf, math.nan, -448.0])
    back = restored(*stored(x), x.dtype)
    assert back.isnan().tolist() == [False, True, True, False] and back[3] == -448


@pytest.mark.one_in(2)
@every_family
@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_fp8_input_store(family, backend, values_and_gradients, saved_bytes, request):
    if backend == "inductor":
        request.getfixturevalue("warm_inductor")
    y, bias, weights, g = tensors(dtype=torch.float32)
    op = getattr(fused, f"weighted_bias_{family}")
    near = restored(*stored(y), y.dtype)
    with fused.backend(backend):
        out, *grads = values_and_gradients(lambda *a: op(*a, fp8_input_store=True), g, y, bias, weights)
        exact = values_and_gradients(op, g, y, bias, weights)
        rounded = values_and_gradients(op, g, near, bias, weights)
    assert torch.equal(out, exact[0])
    assert all(map(torch.equal, grads, rounded[1:]))
    for ours, plain in zip(grads, exact[1:], strict=True):
        assert (ours - plain).norm() < 0.1 * plain.norm()
    y.requires_grad_()
    others = (bias.numel() + weights.numel()) * 4
    assert saved_bytes(lambda: op(y, bias, weights, fp8_input_store=True)) == y.numel() + 4 + others


def test_fp8_of_two_tensors_and_second_derivatives(saved_bytes):
    y = tensors(dtype=torch.bfloat16)[0].requires_grad_()
    gate, up = y.chunk(2, -1)
    assert saved_bytes(lambda: fused.gated_activation(gate, up, "silu", fp8_input_store=True)) == y.numel() + 8
    out = fused.swiglu(y, fp8_input_store=True)
    with pytest.raises(RuntimeError, match=r"second derivative.*fp8_input_store=False"):
        torch.autograd.grad(out.sum(), y, create_graph=True)


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_halves_of_one_tensor(backend, values_and_gradients, request):
    """As fused projections give them: joined (Phi3), interleaved (GPT-OSS), and alike but apart."""
    if backend == "inductor":
        request.getfixturevalue("warm_inductor")
    y, _, _, g = tensors((3, 5, 34), torch.float32)
    apart = torch.randn(2, 3, 5, 17)
    cuts = {
        "joined": lambda t: t.chunk(2, -1),
        "swapped": lambda t: t.chunk(2, -1)[::-1],
        "interleaved": lambda t: (t[..., ::2], t[..., 1::2]),
        "one of a pair of rows": lambda t: t[::2].chunk(2, -1),
        "same": lambda t: (t[..., :17], t[..., :17]),
        "apart": lambda t: (apart[0], t[..., 17:]),
    }
    for name, cut in cuts.items():
        part = g[::2] if name == "one of a pair of rows" else g

        def ours(t, cut=cut):
            return fused.gated_activation(*cut(t), "silu")

        with fused.backend(backend):
            mine = values_and_gradients(ours, part, y)
        gates = values_and_gradients(lambda t, cut=cut: F.silu(cut(t)[0]) * cut(t)[1], part, y)
        torch.testing.assert_close(mine, gates, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_compiled_code_gets_the_halves_of_one_tensor_without_copying_them():
    y, _, _, g = tensors((3, 5, 34), torch.float32)
    first, second = y.chunk(2, -1)
    for gate, up in ((first, second), (second, first)):
        inputs, _ = GATED_ACTIVATION.canonical((g, gate, up, None, None, None, None))
        whole = [each for each in inputs if each is not None][1]
        assert whole.is_contiguous() and whole.data_ptr() == y.data_ptr() and whole.numel() == y.numel()


def test_weights_of_another_dtype(values_and_gradients):
    y, bias, weights, g = tensors(dtype=torch.bfloat16)
    out, dy, dweights = values_and_gradients(fused.weighted_swiglu, g, y, weights.float())
    assert (out.dtype, dy.dtype, dweights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    exact = values_and_gradients(fused.weighted_swiglu, g.double(), y.double(), weights.double())
    torch.testing.assert_close(dweights.double(), exact[2], rtol=1e-5, atol=1e-5)
    out, dy, dbias = values_and_gradients(fused.bias_swiglu, g, y, bias.float())
    assert (out.dtype, dy.dtype, dbias.dtype) == (torch.float32, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("shape", [(8,), (1, 2), (3, 8), (2, 1, 3, 2, 8), (0, 8), (4, 0)])
def test_any_rank_and_empty_tensors(shape, values_and_gradients):
    y, bias, weights, g = tensors(shape)
    ours = values_and_gradients(fused.weighted_bias_swiglu, g, y, bias, weights)
    theirs = values_and_gradients(lambda y, b, w: eager("silu", y + b) * w, g, y, bias, weights)
    torch.testing.assert_close(ours, theirs)


def test_a_gradient_of_infinity_stays_outside_of_relu(warm_inductor):
    for backend in ("reference", "inductor"):
        y = torch.tensor([[-1.0, 2.0, 3.0, 4.0]], requires_grad=True)
        with fused.backend(backend):
            fused.reglu(y).backward(torch.tensor([[math.inf, 1.0]]))
        assert y.grad is not None and y.grad[0, :2].tolist() == [0, 4]


Y = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: fused.swiglu(torch.ones(2, 3)),
            ValueError,
            r"swiglu: the last dimension of the input \[2, 3\] is odd",
        ),
        (lambda: fused.swiglu(torch.ones(())), ValueError, "at least 1 dimension"),
        (lambda: fused.reglu(torch.ones(2, 4, dtype=torch.int64)), TypeError, "reglu: input.*int64"),
        (lambda: fused.bias_geglu(Y, torch.ones(2)), ValueError, r"bias_geglu: bias must have shape \[4\]"),
        (lambda: fused.geglu(Y, approximate="erf"), ValueError, "'tanh' or 'none', got 'erf'"),
        (lambda: fused.weighted_swiglu(Y, torch.ones(2)), ValueError, r"weights of shape \[2\].*\[2, 4\]"),
        (lambda: fused.weighted_swiglu(Y, torch.ones(2, 1).long()), TypeError, "weights.*int64"),
        (lambda: fused.swiglu(Y, clamp_value=-1.0), ValueError, "clamp_value must be 0 or more.*got -1"),
        (lambda: fused.swiglu(Y, clamp_value="7"), TypeError, "clamp_value must be a number, got str"),
        (lambda: fused.quick_geglu(Y, torch.ones(1)), TypeError, "linear_offset must be a number, got Tensor"),
        (lambda: fused.gated_activation(Y, Y, "swish"), ValueError, "swish.*relu.*silu"),
        (lambda: fused.gated_activation(Y, Y[..., :3], "silu"), ValueError, r"gate \[2, 4\] and up \[2, 3\]"),
        (lambda: fused.gated_activation(Y, None, "silu"), TypeError, "up must be a tensor"),
        (lambda: fused.gated_activation(Y, Y.to("meta"), "silu"), ValueError, "on meta.*on cpu"),
    ],
)
def test_bad_input(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_agrees_with_transformers_mlps():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = pytest.importorskip("transformers").GptOssConfig(
        hidden_size=8, intermediate_size=16, num_local_experts=2, num_experts_per_tok=1
    )
    experts = gpt_oss.GptOssExperts(config)
    gate_up = 8 * torch.randn(5, 32)
    ours = fused.gated_activation(
        gate_up[..., ::2], gate_up[..., 1::2], "quick_gelu", linear_offset=1.0, clamp_value=experts.limit
    )
    torch.testing.assert_close(ours, experts._apply_gate(gate_up), rtol=1.3e-6, atol=1e-6)
