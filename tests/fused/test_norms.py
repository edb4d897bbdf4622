"""The norms against modeling code; `cases_norms.py` has the quality lines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused
from tests.dispatched import Calls
from tests.fused.cases_norms import EPS, eager_layer_norm, eager_rms_norm


@pytest.fixture
def xrwb():
    torch.manual_seed(0)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in ((3, 5, 8), (3, 5, 8), (8,), (8,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_agrees_with_transformers(xrwb, dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(8, EPS)
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(8, EPS)
    x, _, weight, _ = (t.to(dtype) for t in xrwb)
    for module, casting in ((llama, "llama"), (gemma, "gemma")):
        module.weight.data = weight
        assert torch.equal(fused.rms_norm(x, weight, EPS, casting=casting), module(x))


def test_agrees_with_torch(xrwb):
    x, _, weight, bias = (t.bfloat16() for t in xrwb)
    assert torch.equal(fused.rms_norm(x, weight, EPS, casting="torch"), F.rms_norm(x, (8,), weight, EPS))
    assert torch.equal(fused.layer_norm(x, weight, bias, EPS), F.layer_norm(x, (8,), weight, bias, EPS))


def test_a_transposed_input_is_copied_once_for_a_contiguous_result():
    x, weight = torch.randn(2, 8, 5).transpose(1, 2), torch.randn(8)
    for operands in ((x, weight, None), (x.detach().requires_grad_(), weight, None)):
        with Calls() as calls:
            normed = fused.layer_norm(*operands)
        assert [name for name in calls.names if name in ("clone", "copy_", "native_layer_norm")] == [
            "clone",
            "native_layer_norm",
        ]
        assert torch.equal(normed, F.layer_norm(x, (8,), weight, eps=EPS))


def test_wrong_variants_are_told_apart(xrwb):
    x, residual, weight, bias = xrwb
    rms, layer = fused.rms_norm(x, weight, EPS), fused.layer_norm(x, weight, bias, EPS)
    wrong = [
        (rms, eager_rms_norm(x, 1 + weight)),
        (rms, eager_rms_norm(x, None)),
        (rms, eager_rms_norm(x, weight, eps=1e-3)),
        (rms, eager_layer_norm(x, weight, None)),
        (layer, eager_layer_norm(x, weight, None)),
        (layer, eager_rms_norm(x, weight) + bias),
        (fused.add_rms_norm(x, residual, weight, EPS)[0], rms),
    ]
    for mine, mutant in wrong:
        assert not torch.allclose(mine, mutant, rtol=1e-6, atol=1e-6)


def test_the_dtypes_of_mixed_tensors(xrwb):
    x, residual, weight, bias = (t.float() for t in xrwb)
    half = x.bfloat16()
    assert fused.rms_norm(half, weight).dtype == torch.float32
    assert fused.rms_norm(half, weight, casting="gemma").dtype == torch.bfloat16
    assert fused.layer_norm(half, weight, bias).dtype == torch.bfloat16
    leaves = [t.clone().requires_grad_() for t in (half, residual, weight)]
    normed, total = fused.add_rms_norm(*leaves)
    assert normed.dtype == total.dtype == torch.float32
    gradients = torch.autograd.grad((normed * total).sum(), leaves)
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_two_results_alone(xrwb, which):
    x, residual, weight, bias = xrwb
    for op, eager, parameters in (
        (fused.add_rms_norm, eager_rms_norm, (weight,)),
        (fused.add_layer_norm, eager_layer_norm, (weight, bias)),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, residual)]
        results = (
            (
                eager(leaves[0] + leaves[1], *parameters, EPS)
                if op is fused.add_rms_norm
                else eager(leaves[0] + leaves[1], *parameters)
            ),
            leaves[0] + leaves[1],
        )
        mine = torch.autograd.grad(op(*leaves, *parameters, EPS)[which].square().sum(), leaves)
        theirs = torch.autograd.grad(results[which].square().sum(), leaves)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_weight_gradients_of_many_rows_on_inductor(warm_inductor, xrwb):
    torch.manual_seed(0)
    for rows, dtype in ((64, torch.bfloat16), (65, torch.bfloat16), (64, torch.float32)):
        x, weight, g = (torch.randn(shape).to(dtype) for shape in ((rows, 8), (8,), (rows, 8)))
        exact = weight.double().requires_grad_()
        (truth,) = torch.autograd.grad(eager_rms_norm(x.double(), exact), exact, g.double())
        with fused.backend("inductor"):
            leaf = weight.clone().requires_grad_()
            (mine,) = torch.autograd.grad(fused.rms_norm(x, leaf, EPS), leaf, g)
        torch.testing.assert_close(mine, truth.to(dtype), rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5)


def test_errors_say_what_does_not_fit(xrwb):
    x, residual, weight, bias = xrwb
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[8\].*got \[7\]"):
        fused.rms_norm(x, weight[:7])
    with pytest.raises(ValueError, match=r"layer_norm: bias must have shape \[8\]"):
        fused.layer_norm(x, weight, bias[:7])
    with pytest.raises(ValueError, match=r"residual \[.*7\].*do not broadcast"):
        fused.add_rms_norm(x, residual[..., :7], weight)
    with pytest.raises(ValueError, match="no casting 'mistral'"):
        fused.rms_norm(x, weight, casting="mistral")
    with pytest.raises(TypeError, match="eps must be a number"):
        fused.layer_norm(x, weight, bias, None)
    with pytest.raises(TypeError, match="input must be float16"):
        fused.rms_norm(x.int(), weight)


@pytest.mark.parametrize("op", [fused.add_rms_norm, lambda x, r, w: fused.add_layer_norm(x, r, w, None)])
def test_the_sum_needs_a_gradient_if_its_operands_do(op):
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, requires_grad=True)
    normed, total = op(x, residual, weight)
    assert normed.requires_grad and not total.requires_grad
    assert op(x, residual.requires_grad_(), weight)[1].requires_grad
