"""Megatron's functions and module against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import fused
from fused import AttnMaskType, FusedScaleMaskSoftmax

SHAPE = (2, 3, 6, 6)


def megatron_mask(scores, mask):
    """Megatron's attention_mask_func: changes the scores."""
    return scores.masked_fill_(mask, -10000.0)


def scores(shape=SHAPE, dtype=torch.float64):
    torch.manual_seed(0)
    return (3 * torch.randn(shape)).to(dtype)


def future(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def make(kind="causal", fusion=True, scale=0.5, fp16=False, bf16=False, window=None, mask_func=megatron_mask):
    return FusedScaleMaskSoftmax(fp16, bf16, AttnMaskType[kind], fusion, mask_func, True, scale, window)


def test_functions():
    x = scores()
    hidden = torch.rand(2, 1, 6, 6) < 0.3
    hidden[..., 0] = False
    plain = fused.ScaledSoftmax.apply(x, 0.5)
    torch.testing.assert_close(plain, F.softmax(x * 0.5, -1), rtol=1e-12, atol=1e-12)
    masked = fused.ScaledMaskedSoftmax.apply(x, hidden.to(torch.uint8), 0.5)
    expected = F.softmax((x * 0.5).masked_fill(hidden, -math.inf), -1)
    torch.testing.assert_close(masked, expected, rtol=1e-12, atol=1e-12)
    for y in (x, x.view(6, 6, 6), x[:, :, :4], x[..., :4]):
        causal = fused.ScaledUpperTriangMaskedSoftmax.apply(y, 0.5)
        hidden = future(*y.shape[-2:])
        expected = F.softmax((y * 0.5).masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
        torch.testing.assert_close(causal, expected, rtol=1e-12, atol=1e-12)
        assert (causal.masked_select(hidden.expand_as(causal)) == 0).all()
    assert fused.ScaledMaskedSoftmax.apply(x, torch.ones(6, 6, dtype=torch.bool), 1.0).abs().sum() == 0


def functions():
    hidden = torch.rand(2, 1, 3, 3) < 0.4
    return [
        lambda x: fused.ScaledSoftmax.apply(x, 0.5),
        lambda x: fused.ScaledMaskedSoftmax.apply(x, hidden, 0.5),
        lambda x: fused.ScaledUpperTriangMaskedSoftmax.apply(x, 0.5),
    ]


@pytest.mark.parametrize("index", range(3))
def test_functions_under_differentiation_and_tracing(index):
    op = functions()[index]
    x = scores((2, 2, 3, 3)).requires_grad_()
    assert gradcheck(op, (x,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(op, (x,))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    g = torch.randn_like(x)
    torch.testing.assert_close(compiled(x), op(x))
    mine, theirs = (torch.autograd.grad(f(x), x, g)[0] for f in (compiled, op))
    torch.testing.assert_close(mine, theirs)
    if index != 1:
        torch.testing.assert_close(torch.func.vmap(op)(x), op(x))


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_round_16_bit_gradients_once(index, backend, assert_no_worse, values_and_gradients):
    """A compiler opens an autograd function, and sees its parts."""
    op = functions()[index]
    x, g = scores((2, 160, 3, 3), torch.bfloat16), torch.randn(2, 160, 3, 3).bfloat16()
    compiled = torch.compile(op, fullgraph=True, backend=backend)
    exact = values_and_gradients(op, g.double(), x.double())
    rounded = [t.bfloat16() for t in exact]
    assert_no_worse(values_and_gradients(compiled, g, x), rounded, exact)


def test_module_and_dropout_compile_without_graph_break(values_and_gradients):
    x, g = scores(dtype=torch.float32), torch.randn(SHAPE)
    module = make()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        values_and_gradients(lambda x: compiled(x, None), g, x),
        values_and_gradients(lambda x: module(x, None), g, x),
    )
    dropped = torch.compile(
        lambda x: fused.scaled_masked_softmax(x, None, 0.5, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    assert 0.2 < (dropped(x) == 0).float().mean() < 0.8


def test_functions_refuse_other_masks():
    with pytest.raises(TypeError, match=r"float32.*scaled_masked_softmax takes additive masks"):
        fused.ScaledMaskedSoftmax.apply(scores(), torch.zeros(6, 6), 1.0)
    with pytest.raises(ValueError, match=r"at least 2 dimension.*\[6\]"):
        fused.ScaledUpperTriangMaskedSoftmax.apply(torch.ones(6), 1.0)


@pytest.mark.parametrize("kind", AttnMaskType.__members__)
@pytest.mark.parametrize("window", [None, (2, 0), (1, 1)])
@pytest.mark.parametrize("given", [True, False], ids=["mask", "no mask"])
def test_module_both_ways(kind, window, given):
    """Fused and not, the same: the mask given, the causal one and the window all count."""
    x = scores()
    mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 1] = True
    mask = mask if given else None
    hidden = torch.zeros(6, 6, dtype=torch.bool) if mask is None else mask
    if "causal" in kind:
        hidden = hidden | future(6, 6)
    if window is not None:
        distance = torch.arange(6) - torch.arange(6).unsqueeze(-1)
        hidden = hidden | (distance > window[1]) | (distance < -window[0])
    expected = F.softmax((x * 0.5).masked_fill(hidden, -10000.0), -1)
    for fusion in (True, False):
        before = x.clone()
        out = make(kind, fusion, window=window)(x, mask)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(x, before)


def test_module_never_hands_its_input_to_the_mask_function():
    x = scores()
    make("padding", fusion=False, scale=None)(x, torch.ones(6, 6, dtype=torch.bool))
    assert torch.equal(x, scores())


def test_the_kernel_is_available_exactly_if_the_mask_function_is_not_called():
    called = []

    def mask_func(scores, mask):
        called.append(scores)
        return scores.masked_fill(mask, -10000.0)

    x, mask = scores(), torch.zeros(6, 6, dtype=torch.bool)
    for fusion, function in ((True, mask_func), (True, None), (False, mask_func), (False, None)):
        module = make("padding", fusion, mask_func=function)
        called.clear()
        module(x, mask)
        assert module.is_kernel_available(mask, *x.shape) is (not called)


def test_module_with_fewer_queries_than_keys():
    x = scores((2, 3, 2, 6))
    expected = F.softmax((x * 0.5).masked_fill(future(2, 6), -math.inf), -1)
    for fusion in (True, False):
        torch.testing.assert_close(make(fusion=fusion)(x, None), expected, rtol=1e-12, atol=1e-12)


def test_module_dtypes_and_offsets():
    x = scores(dtype=torch.bfloat16)
    for fusion in (True, False):
        assert make(fusion=fusion, bf16=True)(x, None).dtype == torch.bfloat16
        assert make(fusion=fusion, fp16=True)(x.half(), None).dtype == torch.float16
    offset = torch.randn(3)
    column = offset.view(1, 3, 1, 1).expand(2, 3, 6, 1)
    y = scores(dtype=torch.float32)
    expected = F.softmax(torch.cat([y * 0.5, column], -1), -1)[..., :-1]
    for fusion in (True, False):
        torch.testing.assert_close(make("no_mask", fusion)(y, None, offset), expected)


def test_module_bad_settings():
    with pytest.raises(ValueError, match="both fp16 and bf16 flags cannot be active at the same time"):
        make(fp16=True, bf16=True)
    with pytest.raises(ValueError, match="softmax should be in fp32 when scaled"):
        FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, None, False, 0.5)
    with pytest.raises(ValueError, match="no mask type 'diagonal'; there are padding, causal"):
        FusedScaleMaskSoftmax(False, False, "diagonal", True, None, True, None)
    with pytest.raises(ValueError, match=r"\[b, np, sq, sk\], got \[6, 6\]"):
        make()(torch.ones(6, 6), None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_without_float32_two_bytes_each_are_saved_and_gradients_are_as_in_native_softmax(
    backend, dtype, warm_inductor, saved_bytes, values_and_gradients, assert_no_worse
):
    x, g = ((3 * torch.randn(2, 3, 33, 65)).to(dtype) for _ in range(2))

    def native(x):
        return torch.softmax(x, -1)

    def ours(x):
        return fused.scaled_masked_softmax(x, softmax_in_fp32=False)

    with fused.backend(backend):
        results = values_and_gradients(ours, g, x)
        leaf = x.clone().requires_grad_()
        assert saved_bytes(lambda: ours(leaf)) == saved_bytes(lambda: native(leaf)) == 2 * x.numel()
        assert saved_bytes(lambda: fused.scaled_masked_softmax(leaf)) == 3 * x.numel()
    exact = values_and_gradients(native, g.double(), x.double())
    assert_no_worse(results, values_and_gradients(native, g, x), exact)
