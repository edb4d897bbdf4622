"""Rotary position embedding against modeling code; `cases_rotary.py` has the quality lines."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fused
from fused.backends import compiled_rotary
from tests.fused.cases_rotary import eager_rotary, inputs


@pytest.fixture
def qkcs():
    torch.manual_seed(0)
    return inputs(5, 4)


def test_agrees_with_transformers(qkcs):
    q, k, cos, sin = qkcs
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    for mine, theirs in zip(fused.rotary_embedding(*qkcs), llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    glm = pytest.importorskip("transformers.models.glm.modeling_glm")
    repeated = [t[..., :4].repeat_interleave(2, -1) for t in (cos, sin)]
    ours = fused.rotary_embedding(q, k, *repeated, interleaved=True)
    for mine, theirs in zip(ours, glm.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_heads_may_come_last_or_be_broadcast_already(qkcs):
    q, k, cos, sin = qkcs
    expected = fused.rotary_embedding(*qkcs)
    turned = fused.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    one = fused.rotary_embedding(q[:1], k[:1], cos[0], sin[0], unsqueeze_dim=None)
    for mine, short, truth in zip(turned, one, expected, strict=True):
        assert torch.equal(mine.transpose(1, 2), truth) and torch.equal(short, truth[:1])


def test_wrong_variants_are_told_apart(qkcs):
    q, k, cos, sin = qkcs
    right = fused.rotary_embedding(*qkcs)
    wrong = [eager_rotary(q, k, cos, sin, True), eager_rotary(q, k, sin, cos), eager_rotary(q, k, cos, -sin)]
    for mutant in wrong:
        assert not torch.allclose(right[0], mutant[0], rtol=1e-6, atol=1e-6)


def test_cos_and_sin_get_gradients_if_they_require_them(qkcs):
    leaves = [t.clone().requires_grad_() for t in qkcs]
    assert torch.autograd.gradcheck(lambda *t: fused.rotary_embedding(*t), leaves)


@pytest.mark.parametrize("needed", [0, 1])
def test_one_gradient_alone(qkcs, needed):
    leaves = [t.clone().requires_grad_(n == needed) for n, t in enumerate(qkcs)]
    outs = fused.rotary_embedding(*leaves)
    expected = eager_rotary(*leaves)
    (mine,) = torch.autograd.grad(outs[needed].square().sum(), leaves[needed])
    torch.testing.assert_close(mine, torch.autograd.grad(expected[needed].square().sum(), leaves[needed])[0])


def test_errors_say_what_does_not_fit(qkcs):
    q, k, cos, sin = qkcs
    with pytest.raises(ValueError, match=r"not alike"):
        fused.rotary_embedding(q, k, cos, sin.float())
    with pytest.raises(ValueError, match=r"must be even"):
        fused.rotary_embedding(q, k, cos[..., :3], sin[..., :3])
    with pytest.raises(ValueError, match=r"wider than k \[2, 2, 5, 6\]"):
        fused.rotary_embedding(q, k[..., :6], cos, sin)
    with pytest.raises(ValueError, match=r"cos .* and q \[2, 4, 5, 8\] do not broadcast"):
        fused.rotary_embedding(q, k, cos[:, :4], sin[:, :4])
    with pytest.raises(ValueError, match="unsqueeze_dim 3"):
        fused.rotary_embedding(q, k, cos, sin, unsqueeze_dim=3)
    with pytest.raises(TypeError, match="q must be float16"):
        fused.rotary_embedding(q.int(), k, cos, sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_views_that_take_apart_something_else_are_computed_as_they_are_written(qkcs, interleaved):
    x, _, cos, sin = qkcs
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    leading, parts, dim = x.shape[:-1], (-1, 2) if interleaved else (2, -1), -1 if interleaved else -2

    def written(*sizes):
        first, second = x.reshape(*sizes).unbind(dim)[:2]
        swapped = torch.stack((-second, first), -1).flatten(-2) if interleaved else torch.cat((-second, first), -1)
        return x * cos + swapped * sin

    for sizes in ((*leading, *parts), (x.shape[0], x.shape[2], x.shape[1], *parts)):
        viewed = {"interleaved": interleaved, "turned": (None, (sizes, None))}
        if sizes[:3] == leading:
            torch.testing.assert_close(fused.apply_rotary(x, cos, sin, **viewed), written(*sizes))
        else:
            with pytest.raises(RuntimeError):
                fused.apply_rotary(x, cos, sin, **viewed)
            with pytest.raises(RuntimeError):
                written(*sizes)
    with pytest.raises(RuntimeError, match="unflatten"):
        odd = x[..., :7], cos[..., :7], sin[..., :7]
        fused.apply_rotary(*odd, interleaved=interleaved, turned=(None, (None, None)))


@pytest.mark.parametrize("backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_results_of_another_dtype_are_rounded_once(qkcs, backend, interleaved):
    q, k, cos, sin = (t.float() for t in qkcs)
    narrow = [t.bfloat16().requires_grad_() for t in (q, k)]
    wide = [t.detach().float().requires_grad_() for t in narrow]
    with fused.backend(backend):
        ours = fused.rotary_embedding(*narrow, cos, sin, interleaved=interleaved, out_dtype=torch.bfloat16)
        eager = eager_rotary(*wide, cos, sin, interleaved)
        for mine, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(mine, other.bfloat16(), rtol=0.01, atol=1e-6)
        grads = torch.autograd.grad(sum(t.square().sum() for t in ours), narrow)
    for mine, other in zip(grads, torch.autograd.grad(sum(t.square().sum() for t in eager), wide), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, other.bfloat16(), rtol=0.02, atol=0.05)
    with pytest.raises(TypeError, match=r"out_dtype must be a floating-point dtype, got torch.int32"):
        fused.rotary_embedding(*narrow, cos, sin, out_dtype=torch.int32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_compiled_code_joins_halves_that_are_rounded(interleaved):
    """Joined tensors are written to memory: in float32, they took a second pass and 1.2 times the time of torch's."""
    x, k, cos, sin = (torch.randn(2, 4, 8).bfloat16() for _ in range(4))
    for formula in (compiled_rotary.rotary, compiled_rotary.rotary_backward):
        graph = make_fx(partial(formula, interleaved=interleaved))(x, k, cos, sin).graph
        joined = [node.meta["tensor_meta"].dtype for node in graph.nodes if node.target is torch.ops.aten.stack.default]
        assert joined == [torch.bfloat16, torch.bfloat16]
