"""scaled_masked_softmax against eager attention as HuggingFace writes it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import fused

SCALE = 1 / math.sqrt(80)
HALVES = (torch.bfloat16, torch.float16)


def huggingface(x, mask=None, scale=SCALE, dropout_p=0.0):
    """eager_attention_forward, from the scores to the weights."""
    scores = x * scale
    if mask is not None:
        scores = scores + mask
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = F.softmax(scores, dim=-1, dtype=dtype).to(x.dtype)
    return F.dropout(weights, dropout_p)


def tensors(shape=(2, 3, 7, 9), dtype=torch.float64, spread=3.0):
    torch.manual_seed(0)
    return (spread * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)


def hidden_by(queries, keys, left=-1, right=-1):
    """Bool [queries, keys] by the definition, element by element."""
    rows = []
    for query in range(queries):
        own = query + keys - queries
        rows.append([(0 <= right < key - own) or (0 <= left < own - key) for key in range(keys)])
    return torch.tensor(rows)


def masks(dtype, shape=(2, 3, 7, 9)):
    batch, heads, queries, keys = shape
    padding = torch.zeros(batch, 1, 1, keys, dtype=dtype)
    padding[0, ..., -3:] = torch.finfo(dtype).min
    causal = torch.zeros(queries, keys, dtype=dtype).masked_fill(
        hidden_by(queries, keys, right=0), torch.finfo(dtype).min
    )
    positions = torch.randn(1, heads, queries, keys).to(dtype)
    alibi = (-torch.rand(batch * heads, 1, keys)).to(dtype).view(batch, heads, 1, keys)
    return {"none": None, "padding": padding, "causal": causal, "positions": positions, "alibi": alibi}


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "positions", "alibi"])
def test_equals_huggingface_within_the_tolerances(kind, values_and_gradients):
    for dtype, tolerance in ((torch.float64, {"rtol": 1e-12, "atol": 1e-12}), (torch.float32, {})):
        x, g = tensors(dtype=dtype)
        mask = masks(dtype)[kind]
        exact = values_and_gradients(
            lambda x, m=mask: huggingface(x, None if m is None else m.double()), g.double(), x.double()
        )
        ours = values_and_gradients(lambda x, m=mask: fused.scaled_masked_softmax(x, m, SCALE), g, x)
        limits = tolerance or {"rtol": 1.3e-6, "atol": 1e-6}
        torch.testing.assert_close([t.double() for t in ours], list(exact), **limits)


def megatron(x, mask=None, scale=SCALE):
    """Megatron's unfused softmax, which rounds the gradient once at any scale."""
    if x.dtype == torch.float64:
        return huggingface(x, mask, scale)
    scores = x.float() * scale
    return F.softmax(scores if mask is None else scores + mask, -1).to(x.dtype)


def hide(mask, dtype):
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, torch.finfo(dtype).min)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["none", "padding", "causal", "positions", "alibi", "boolean"])
@pytest.mark.parametrize("scale", [1 / 8, SCALE, 1.0], ids=["1:8", "1:sqrt(80)", "1"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_no_worse_than_eager(kind, scale, dtype, values_and_gradients, assert_no_worse):
    shape = (2, 3, 40, 65)
    x, g = tensors(shape, dtype)
    mask = {**masks(dtype, shape), "boolean": hidden_by(40, 65, right=0)}[kind]
    additive = hide(mask, dtype)
    wide = None if mask is None else hide(mask, torch.float64).double()
    exact = values_and_gradients(lambda x: huggingface(x, wide, scale), g.double(), x.double())
    ours = values_and_gradients(lambda x: fused.scaled_masked_softmax(x, mask, scale), g, x)
    assert ours[0].dtype == ours[1].dtype == dtype
    for eager in (huggingface, megatron):
        theirs = values_and_gradients(lambda x, eager=eager: eager(x, additive, scale), g, x)
        assert_no_worse(ours, theirs, exact)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_with_dropout_is_no_worse_than_eager(dtype, values_and_gradients, assert_no_worse):
    x, g = tensors((2, 3, 40, 65), dtype)

    def run(op, x, g):
        def seeded(x):
            torch.manual_seed(7)
            return op(x, None, 1 / 8, dropout_p=0.5)

        return values_and_gradients(seeded, g, x)

    exact = run(huggingface, x.double(), g.double())
    assert_no_worse(run(fused.scaled_masked_softmax, x, g), run(huggingface, x, g), exact)


def test_wrong_variants_are_told_apart():
    """The tolerance of these tests catches each mutation: wrong scale, no mask, the scale after the mask."""
    x, _ = tensors()
    mask = masks(torch.float64)["positions"]
    ours = fused.scaled_masked_softmax(x, mask, SCALE)
    for mutant in (
        huggingface(x, mask, 1 / 8),
        huggingface(x),
        huggingface(x, mask * SCALE),
        huggingface(x.transpose(0, 0).flip(0), mask),
        huggingface(x, -mask),
    ):
        assert not torch.allclose(ours, mutant, rtol=1e-6, atol=1e-6)


def test_a_learned_bias_gets_its_gradient_in_its_shape_and_dtype(values_and_gradients):
    x, g = tensors()
    for shape in ((1, 3, 7, 9), (3, 7, 9), (9,), (1, 1, 7, 1), (2, 3, 7, 9)):
        bias = torch.randn(shape, dtype=torch.float64)
        ours = values_and_gradients(lambda x, b: fused.scaled_masked_softmax(x, b, SCALE), g, x, bias)
        theirs = values_and_gradients(huggingface, g, x, bias)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    out, dx, dbias = values_and_gradients(
        lambda x, b: fused.scaled_masked_softmax(x, b, SCALE), g, x.bfloat16(), bias.float()
    )
    assert (out.dtype, dx.dtype, dbias.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_boolean_masks_hide_where_true(values_and_gradients):
    x, g = tensors()
    hidden = torch.rand(2, 1, 7, 9) < 0.4
    hidden[0, 0, 2] = True
    for mask in (hidden, hidden.to(torch.uint8)):
        out, dx = values_and_gradients(lambda x, m=mask: fused.scaled_masked_softmax(x, m, SCALE), g, x)
        assert (out[0, :, 2] == 0).all() and (dx[0, :, 2] == 0).all()
        assert (out.masked_select(hidden.expand_as(out)) == 0).all()
        visible = ~hidden.all(-1, keepdim=True).expand_as(out)
        eager = huggingface(x.masked_fill(hidden, -math.inf))
        torch.testing.assert_close(out[visible], eager[visible], rtol=1e-12, atol=1e-12)


def test_rows_hidden_by_an_additive_mask_are_as_in_eager():
    x, _ = tensors()
    for fill in (-math.inf, torch.finfo(torch.float32).min):
        mask = torch.zeros(7, 9)
        mask[2] = fill
        ours = fused.scaled_masked_softmax(x.float(), mask, SCALE)
        torch.testing.assert_close(ours, huggingface(x.float(), mask), equal_nan=True)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (8, 3), (1, 5)])
@pytest.mark.parametrize("window", [None, (2, 0), (0, 1), (-1, 1), (3, -1), (-1, -1)])
@pytest.mark.parametrize("causal", [True, False])
def test_causal_and_windows_align_to_the_last_key(queries, keys, window, causal):
    x, _ = tensors((2, 3, queries, keys))
    left, right = window or (-1, -1)
    hidden = hidden_by(queries, keys, left, 0 if causal else right)
    padding = torch.zeros(1, keys, dtype=torch.bool)
    padding[0, 0] = True
    for mask in (None, padding):
        everything = hidden if mask is None else hidden | mask
        ours = fused.scaled_masked_softmax(x, mask, SCALE, causal=causal, window=window)
        eager = huggingface(x.masked_fill(everything, -math.inf)).nan_to_num(0.0)
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12)


def eager_sink(x, sink, scale=SCALE):
    """GPT-OSS: one more column, then dropped."""
    column = sink.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[-2], -1)
    return F.softmax(torch.cat([x * scale, column], -1), -1)[..., :-1]


def test_sinks(values_and_gradients, saved_bytes):
    x, g = tensors()
    sink = torch.randn(3, dtype=torch.float64)

    def ours(x, sink):
        return fused.scaled_masked_softmax(x, None, SCALE, sink=sink)

    theirs = values_and_gradients(eager_sink, g, x, sink)
    torch.testing.assert_close(values_and_gradients(ours, g, x, sink), theirs, rtol=1e-12, atol=1e-12)
    broad = sink.view(1, 3, 1, 1).expand(2, 3, 7, 1)
    torch.testing.assert_close(ours(x, broad), theirs[0], rtol=1e-12, atol=1e-12)
    hidden = torch.ones(7, 9, dtype=torch.bool)
    assert (fused.scaled_masked_softmax(x, hidden, SCALE, sink=sink) == 0).all()
    empty = fused.scaled_masked_softmax(x[..., :0], None, SCALE, sink=sink)
    assert empty.shape == (2, 3, 7, 0)
    leaf = x.clone().requires_grad_()
    assert saved_bytes(lambda: ours(leaf, sink)) == 8 * (x.numel() + x[..., 0].numel())


@pytest.mark.one_in(10)
def test_gradients_of_both_orders():
    torch.manual_seed(0)
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    hidden = torch.rand(2, 1, 3, 4) < 0.4
    hidden[0, 0, 1] = True

    def additive(x, mask):
        return fused.scaled_masked_softmax(x, mask, 0.5)

    def boolean(x):
        return fused.scaled_masked_softmax(x, hidden, 0.5, causal=True)

    def everything(x, mask, sink):
        return fused.scaled_masked_softmax(x, mask, 0.5, sink=sink, causal=True, window=(1, 0))

    def filled(x, sink):
        return fused.scaled_masked_softmax(x, hidden, 0.5, sink=sink, fill=-1.5)

    for op, inputs in ((additive, (x, mask)), (boolean, (x,)), (everything, (x, mask, sink)), (filled, (x, sink))):
        assert gradcheck(op, inputs, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(op, inputs)

    def dropped(x, mask, sink):
        torch.manual_seed(0)
        return fused.scaled_masked_softmax(x, mask, 0.5, sink=sink, causal=True, dropout_p=0.3)

    assert gradcheck(dropped, (x, mask, sink))
    assert gradgradcheck(dropped, (x, mask, sink))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_is_eager_s_bit_for_bit(dtype, p):
    x, g = tensors(dtype=dtype)
    mask = masks(dtype)["causal"]
    outputs = []
    for op in (huggingface, fused.scaled_masked_softmax):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(7)
        out = op(leaf, mask, SCALE, dropout_p=p)
        outputs.append((out.detach(), torch.autograd.grad(out, leaf, g)[0], torch.rand(2)))
    (theirs, dx_theirs, after), (ours, dx_ours, after_ours) = outputs
    assert torch.equal(ours == 0, theirs == 0)
    assert torch.equal(after, after_ours)
    loose = {"rtol": 1.3e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.02}
    torch.testing.assert_close(ours, theirs, **loose)
    torch.testing.assert_close(dx_ours, dx_theirs, **loose)


def test_saves_the_probabilities_only(saved_bytes):
    """16-bit ones with a third byte, for what rounding took; eager torch saves them in 16 and in 32 bits."""
    for dtype, bytes_each in ((torch.float32, 4), (torch.bfloat16, 3), (torch.float16, 3)):
        x, _ = tensors(dtype=dtype)
        x.requires_grad_()
        mask = masks(dtype)["padding"]

        def used(op, x=x, mask=mask, p=0.0):
            return op(x, mask, SCALE, dropout_p=p)

        for p in (0.0, 0.1):
            ours = saved_bytes(lambda p=p, used=used: used(fused.scaled_masked_softmax, p=p))
            assert ours == bytes_each * x.numel()
        assert saved_bytes(lambda used=used: used(huggingface, p=0.1)) > bytes_each * x.numel()
    wide = saved_bytes(lambda: fused.scaled_masked_softmax(x, None, SCALE, out_dtype=torch.float32))
    assert wide == 4 * x.numel()


def test_never_changes_its_inputs():
    x, _ = tensors()
    mask = masks(torch.float64)["positions"]
    before = x.clone(), mask.clone()
    fused.scaled_masked_softmax(x, mask, SCALE, causal=True, dropout_p=0.5)
    assert torch.equal(x, before[0]) and torch.equal(mask, before[1])


def test_output_dtype():
    x, _ = tensors(dtype=torch.bfloat16)
    out = fused.scaled_masked_softmax(x, None, SCALE, out_dtype=torch.float32)
    torch.testing.assert_close(out, F.softmax(x.float() * SCALE, -1))
    assert fused.scaled_masked_softmax(x, torch.zeros(9), SCALE).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 4, 5), (2, 1, 2, 4, 5), (0, 5), (3, 0), (1, 1)])
def test_any_rank_and_empty_tensors(shape, values_and_gradients):
    x, g = tensors(shape)
    ours = values_and_gradients(lambda x: fused.scaled_masked_softmax(x, None, SCALE), g, x)
    torch.testing.assert_close(ours, values_and_gradients(huggingface, g, x), rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(12)
def test_strides_do_not_matter():
    x, _ = tensors((9, 7, 3, 2))
    view, mask = x.permute(3, 2, 1, 0), masks(torch.float64)["positions"].expand(2, -1, -1, -1)
    ours = fused.scaled_masked_softmax(view, mask, SCALE)
    torch.testing.assert_close(ours, huggingface(view, mask), rtol=1e-12, atol=1e-12)


def test_functorch_transforms():
    x, _ = tensors()
    mask = masks(torch.float64)["positions"]
    sink = torch.randn(3, dtype=torch.float64)

    def op(x, mask):
        return fused.scaled_masked_softmax(x, mask, SCALE, causal=True, sink=sink)

    mapped = torch.func.vmap(op, in_dims=(0, None))(x, mask[0])
    torch.testing.assert_close(mapped, op(x, mask))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(op(leaf, mask).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: op(x, mask).square().sum())(x), gradient)
    tangent = torch.randn_like(x)
    _, derivative = torch.func.jvp(lambda x: op(x, mask).square().sum(), (x,), (tangent,))
    torch.testing.assert_close(derivative, (gradient * tangent).sum())


@pytest.mark.one_in(10)
def test_compiles_without_graph_break_at_any_size(values_and_gradients):
    def wrapped(x, sink):
        return fused.scaled_masked_softmax(x, None, SCALE, causal=True, window=(4, 0), sink=sink) * 2

    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager", dynamic=True)
    sink = torch.randn(3, dtype=torch.float64)
    for shape in ((2, 3, 7, 9), (4, 3, 5, 6)):
        x, g = tensors(shape)
        ours = values_and_gradients(compiled, g, x, sink)
        torch.testing.assert_close(ours, values_and_gradients(wrapped, g, x, sink))


def test_fake_and_meta_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, 7, 9, dtype=torch.bfloat16, requires_grad=True)
        out = fused.scaled_masked_softmax(x, torch.empty(7, 9), SCALE, causal=True, dropout_p=0.1)
        assert out.shape == x.shape and out.dtype == torch.bfloat16
    x = torch.empty(2, 3, 7, 9, device="meta", requires_grad=True)
    fused.scaled_masked_softmax(x, None, SCALE, causal=True).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_autocast_gives_the_dtypes_of_eager(values_and_gradients):
    x, g = tensors(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = values_and_gradients(lambda x: fused.scaled_masked_softmax(x, None, SCALE), g, x)
        theirs = values_and_gradients(huggingface, g, x)
    torch.testing.assert_close(ours, theirs, rtol=1.3e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"x": torch.ones(2, 3, dtype=torch.int32)}, TypeError, r"int32 of shape \[2, 3\]"),
        ({"x": torch.ones(())}, ValueError, "at least 1 dimension"),
        ({"x": torch.ones(3), "causal": True}, ValueError, r"at least 2 dimension.*\[3\]"),
        ({"mask": torch.ones(4)}, ValueError, r"\[4\].*\[2, 3, 5\]"),
        ({"mask": torch.ones(1, 4, 3, 5)}, ValueError, r"\[1, 4, 3, 5\].*\[2, 3, 5\]"),
        ({"mask": torch.ones(5, dtype=torch.int64)}, TypeError, "mask.*int64"),
        ({"mask": torch.ones(5, device="meta")}, ValueError, "on meta.*on cpu"),
        ({"scale": torch.ones(())}, TypeError, "scale.*Tensor"),
        ({"scale": "1"}, TypeError, "scale.*str"),
        ({"dropout_p": -0.1}, ValueError, "between 0 and 1"),
        ({"window": 3}, TypeError, "two integers"),
        ({"window": (-2, 0)}, ValueError, "-2"),
        ({"sink": torch.ones(3)}, ValueError, r"\[3, 1, 1\].*\[2, 3, 5\]"),
        ({"sink": torch.ones(2, 3, 5)}, ValueError, r"sink.*\[2, 3, 5\]"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype.*int8"),
    ],
)
def test_bad_input(keywords, error, text):
    state = torch.get_rng_state()
    with pytest.raises(error, match=text):
        fused.scaled_masked_softmax(**{"x": torch.ones(2, 3, 5), **keywords})
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_a_dropped_nan_and_a_dropped_infinite_gradient_are_nan_as_in_eager(backend, warm_inductor):
    x, g = torch.randn(3, 8), torch.randn(3, 8)
    x[0, 2], g[1, 3] = torch.nan, torch.inf
    results = []
    for op in (
        lambda x: fused.scaled_masked_softmax(x, dropout_p=0.9),
        lambda x: torch.nn.functional.dropout(torch.softmax(x, -1), 0.9),
    ):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(0)
        with fused.backend(backend):
            out = op(leaf)
            (gradient,) = torch.autograd.grad(out, leaf, g)
        results.append((out.detach(), gradient))
    torch.testing.assert_close(results[0], results[1], equal_nan=True)
    assert results[0][0][0].isnan().all() and not results[0][0][1:].isnan().any()
