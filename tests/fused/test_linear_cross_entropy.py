"""linear_cross_entropy in chunks; what holds for every op is tested by the table in cases_losses.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused
from fused import chunked_loss
from fused import linear_cross_entropy as chunked
from fused.backends import OPS

LOSS = OPS["cross_entropy"]


def operands(rows=11, features=6, classes=13, dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, features).to(dtype), torch.randn(classes, features).to(dtype)
    targets = torch.randint(classes, (rows,))
    targets[[2, 7]] = -100
    return [hidden.requires_grad_(), weight.requires_grad_(), targets, torch.randn(classes).to(dtype).requires_grad_()]


def whole(hidden, weight, targets, bias=None, **options):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, **options)


def gradients(result, inputs, g=None, **options):
    return torch.autograd.grad(result, [one for one in inputs if one.requires_grad], g, **options)


@pytest.mark.parametrize("rows", [1, 4, 11, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_add_up(rows, reduction):
    inputs = operands()
    expected = whole(*inputs, reduction=reduction, label_smoothing=0.1)
    result = chunked(*inputs, reduction=reduction, label_smoothing=0.1, chunk_rows=rows)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(expected)
    for mine, theirs in zip(gradients(result, inputs, g), gradients(expected, inputs, g), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_wrong_variants_are_told_apart():
    inputs = operands()
    expected = chunked(*inputs, chunk_rows=4)
    hidden, weight, targets, bias = inputs
    for mutant in (
        whole(hidden, weight, targets),
        whole(*inputs, reduction="sum") / len(targets),
        whole(*inputs, label_smoothing=0.01),
        whole(hidden, weight, targets.roll(1), bias),
        whole(hidden, weight, targets, -bias),
    ):
        assert not torch.allclose(mutant, expected, rtol=1e-6)


def test_logits_are_never_whole(monkeypatch):
    seen = []
    run = LOSS.run
    monkeypatch.setattr(
        LOSS,
        "run",
        lambda part, args, *rest, **statics: seen.append(args[0].shape) or run(part, args, *rest, **statics),
    )
    inputs = operands()
    chunked(*inputs, chunk_rows=4, reduction="none").sum().backward()
    assert seen == [torch.Size((rows, 13)) for rows in (4, 4, 3, 4, 4, 4, 4, 3, 3)]


def test_a_scaled_loss_takes_no_second_pass_over_the_logits(monkeypatch):
    inputs = operands()
    result = chunked(*inputs, chunk_rows=4) * 3
    monkeypatch.setattr(LOSS, "run", None)
    expected = gradients(whole(*inputs) * 3, inputs)
    torch.testing.assert_close(gradients(result, inputs), expected)


@pytest.mark.parametrize("g", [1.0, 0.125, -2.0, 0.3])
def test_gradients_in_bfloat16_are_scaled_by_powers_of_two_only(g, monkeypatch):
    *inputs, bias = operands(dtype=torch.bfloat16)
    expected = gradients(chunked(*inputs, bias, chunk_rows=4, reduction="sum") / 9, [*inputs[:2], bias])
    result = chunked(*inputs, bias, chunk_rows=4)
    passes = []
    run = LOSS.run
    monkeypatch.setattr(LOSS, "run", lambda *args, **statics: passes.append(g) or run(*args, **statics))
    found = gradients(result, [*inputs[:2], bias], torch.tensor(g))
    assert bool(passes) == (g not in (1.0, 0.125))
    for mine, one in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, g * one, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_that_came_with_the_loss_are_not_multiplied_by_one(reduction):
    for g in (1.0, 3.0):
        inputs = operands(dtype=torch.float32)
        result = chunked(*inputs, chunk_rows=4, reduction=reduction)
        kept = result.grad_fn.gradients
        before = [each._version for each in kept]
        found = gradients(result, inputs, torch.tensor(g))
        assert all((each._version == version) == (g == 1) for each, version in zip(kept, before, strict=True))
        torch.testing.assert_close(found, gradients(whole(*inputs, reduction=reduction) * g, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_infinite_gradient_of_the_loss_leaves_ignored_rows_at_zero(dtype):
    inputs = operands(dtype=dtype)
    infinite = torch.tensor(torch.inf)
    ours = gradients(chunked(*inputs, chunk_rows=4), inputs[:1], infinite)[0]
    assert torch.equal(ours[[2, 7]], torch.zeros_like(ours[[2, 7]])) and not ours[0].isfinite().any()


def test_a_second_backward_pass_is_as_the_first():
    inputs = operands()
    result = chunked(*inputs, chunk_rows=4)
    first = gradients(result, inputs, torch.tensor(2.0), retain_graph=True)
    second = gradients(result, inputs, torch.tensor(2.0))
    torch.testing.assert_close(first, second)


def test_a_frozen_weight_costs_nothing():
    hidden, weight, targets, bias = operands()
    weight.requires_grad_(False)
    expected = gradients(whole(hidden, weight, targets, bias), [hidden, bias])
    torch.testing.assert_close(
        gradients(chunked(hidden, weight, targets, bias, chunk_rows=4), [hidden, bias]), expected
    )


def test_nothing_is_differentiated_without_need():
    inputs = operands()
    with torch.no_grad():
        result = chunked(*inputs, chunk_rows=4)
    assert not result.requires_grad
    torch.testing.assert_close(result, whole(*inputs))


def test_all_ignored():
    hidden, weight, targets, bias = operands()
    inputs = [hidden, weight, torch.full_like(targets, -100), bias]
    result = chunked(*inputs, chunk_rows=4)
    assert result.isnan()
    torch.testing.assert_close(gradients(result, inputs), gradients(whole(*inputs), inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_in_many_chunks(dtype, assert_no_worse):
    inputs = operands(64, 32, 100, dtype)
    wide = [one.detach().double().requires_grad_() if one.is_floating_point() else one for one in inputs]
    exact = whole(*wide)
    eager = F.cross_entropy(F.linear(inputs[0], inputs[1], inputs[3]).float(), inputs[2])
    result = chunked(*inputs, chunk_rows=16)
    g = torch.tensor(0.3)
    ours, theirs = gradients(result, inputs, g), gradients(eager, inputs, g)
    assert [one.dtype for one in ours] == [dtype] * 3
    # A sum over chunks of 16-bit products is rounded once more.
    for mine, other, truth in zip(ours, theirs, gradients(exact, wide, g.double()), strict=True):
        error, allowed = (mine.double() - truth).square().mean(), (other.double() - truth).square().mean()
        assert error.sqrt() <= 1.3 * allowed.sqrt()


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
def test_equals_torch():
    inputs = operands()
    hidden, weight, targets, bias = inputs
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=4)
    expected = F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, options=options)
    torch.testing.assert_close(chunked(*inputs, chunk_rows=4), expected)


def test_errors_say_what_to_do():
    hidden, weight, targets, bias = operands()
    with pytest.raises(ValueError, match=r"weight must be \[vocab, 6\].*got \[6, 13\]"):
        chunked(hidden, weight.t(), targets)
    with pytest.raises(ValueError, match=r"bias must be \[13\]"):
        chunked(hidden, weight, targets, bias[:3])
    with pytest.raises(TypeError, match=r"hidden is torch.float64 and weight torch.float32; cast"):
        chunked(hidden, weight.float(), targets)
    with pytest.raises(ValueError, match="one for each row of the hidden states"):
        chunked(hidden, weight, targets[:4])
    with pytest.raises(ValueError, match="chunk_rows must be 1 or more, got 0"):
        chunked(hidden, weight, targets, chunk_rows=0)
    with pytest.raises(IndexError, match=r"target 13 at \[0\] is out of range: there are 13 classes"):
        chunked(hidden, weight, targets.index_fill(0, torch.tensor(0), 13))
    with fused.backend("inductor"):
        torch.testing.assert_close(chunked(hidden, weight, targets, bias), whole(hidden, weight, targets, bias))


@pytest.mark.parametrize("rows", [0, 4])
def test_the_mean_of_no_rows_has_zero_gradients_whatever_comes_back(rows):
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(37, 8, requires_grad=True)
    targets = torch.full((rows,), -100)
    loss = fused.linear_cross_entropy(hidden, weight, targets)
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss.square(), [hidden, weight]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.fixture
def exact_products(monkeypatch):
    """Products of 16-bit matrices in float32, as on CUDA."""
    monkeypatch.setattr(chunked_loss, "has_exact_products", lambda tensor: True)
    monkeypatch.setattr(chunked_loss, "_product", lambda a, b: a.float() @ b.float())


def test_small_gradients_survive_in_float16(exact_products):
    hidden, weight, targets = torch.randn(4096, 8), torch.randn(500, 8) * 0.1, torch.randint(500, (4096,))
    inputs = [hidden.half().requires_grad_(), weight.half().requires_grad_()]
    wide = [one.detach().double().requires_grad_() for one in inputs]
    exact = gradients(whole(*wide, targets), wide)
    loss = chunked(*inputs, targets)
    scale = 2.0**16  # of a GradScaler: 1 / 500 / 4096 is less than float16 holds with three digits
    found = [one.double() / scale for one in gradients(loss, inputs, torch.tensor(scale))]
    for mine, truth in zip(found, exact, strict=True):
        assert (mine - truth).norm() < 1e-3 * truth.norm()


def test_gradients_of_improbable_classes_survive_in_float16(exact_products):
    hidden, weight, targets = torch.randn(256, 8), torch.randn(50, 8) * 0.1, torch.randint(1, 50, (256,))
    bias = torch.zeros(50)
    bias[0] = -14  # a probability of about 2e-8, which float16 does not hold
    inputs = [one.half().requires_grad_() for one in (hidden, weight, bias)]
    wide = [one.detach().double().requires_grad_() for one in inputs]
    (truth,) = torch.autograd.grad(whole(wide[0], wide[1], targets, wide[2]), wide[1])
    (mine,) = torch.autograd.grad(chunked(inputs[0], inputs[1], targets, inputs[2]), inputs[1], torch.tensor(2.0**16))
    error = mine[0].double() / 2.0**16 - truth[0]
    assert error.norm() < 0.05 * truth[0].norm()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_large_z_losses_fit_in_float16(exact_products, reduction):
    hidden, weight, targets, bias = operands(40, 8, 30, torch.float16)
    inputs = [hidden, weight, targets, bias]
    wide = [one.detach().double().requires_grad_() if one.is_floating_point() else one for one in inputs]
    options = {"z_loss": 1.0, "reduction": reduction}
    found = gradients(chunked(*inputs, chunk_rows=16, **options), inputs)
    for mine, truth in zip(found, gradients(chunked(*wide, chunk_rows=16, **options), wide), strict=True):
        assert (mine.double() - truth).norm() < 2e-3 * truth.norm()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiled_code_works_in_chunks(monkeypatch, backend, reduction):
    torch._dynamo.reset()
    seen = []
    run = LOSS.run
    monkeypatch.setattr(
        LOSS,
        "run",
        lambda part, args, *rest, **statics: seen.append(args[0].shape) or run(part, args, *rest, **statics),
    )
    inputs = operands()
    inputs[1].requires_grad_(False)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    compiled = torch.compile(chunked, fullgraph=True, backend=backend)
    result, expected = compiled(*inputs, chunk_rows=4, **options), whole(*inputs, **options)
    g = torch.randn_like(expected)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients(result, inputs, g), gradients(expected, inputs, g))
    assert seen and all(shape in [(4, 13), (3, 13)] for shape in seen)
    with torch.no_grad():
        seen.clear()
        torch.testing.assert_close(compiled(*inputs, chunk_rows=4, **options), expected.detach())
    assert len(seen) == 3, "gradients were computed that nobody asked for"


def test_compiled_code_has_no_second_derivative():
    torch._dynamo.reset()
    hidden, weight, targets, bias = operands()
    result = torch.compile(chunked, backend="eager")(hidden, weight, targets, bias)
    (g,) = torch.autograd.grad(result, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(g.sum(), hidden)


def test_transforms_in_compiled_code_run_the_expression():
    torch._dynamo.reset()
    hidden, weight, targets, bias = (one.detach() for one in operands())

    def of_hidden(hidden):
        return torch.func.grad(lambda x: chunked(x, weight, targets, bias))(hidden)

    compiled = torch.compile(of_hidden, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(hidden), of_hidden(hidden))


def test_the_operator_keeps_its_contract():
    hidden, weight, targets, bias = operands(dtype=torch.float32)
    for reduction, of_classes in (("mean", None), ("none", None), ("mean", torch.rand(len(weight)))):
        operands_of = (hidden, weight, bias, targets, of_classes)
        args = (*operands_of, -100, 0.0, 0.0, None, reduction, False, True, 4, [True, True, True])
        operator = torch.ops.fused.linear_cross_entropy.default
        torch.library.opcheck(
            operator, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )
    with pytest.raises(IndexError, match="target 13"):
        torch.compile(chunked, backend="eager")(hidden, weight, targets.index_fill(0, torch.tensor(0), 13))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_the_classes_compiled_and_twice(reduction):
    hidden, weight, targets, bias = operands()
    inputs, of_classes = [hidden, weight, bias], torch.rand(len(weight), dtype=torch.float64)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    theirs = F.cross_entropy(F.linear(hidden, weight, bias), targets, of_classes, **options)
    expected = torch.autograd.grad(theirs.sum(), inputs)
    for run in (chunked, torch.compile(chunked, backend="aot_eager")):
        mine = run(hidden, weight, targets, bias, class_weight=of_classes, **options)
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(torch.autograd.grad(mine.sum(), inputs, retain_graph=run is chunked), expected)
        if run is chunked:
            again = torch.autograd.grad(mine.sum(), inputs)
            torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_metrics_are_those_of_whole_logits(reduction, dtype):
    hidden, weight, targets, bias = inputs = operands(dtype=dtype)
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "token_scaling": True, "reduction": reduction}
    options["class_weight"] = torch.rand(len(weight), dtype=dtype)
    expected = fused.cross_entropy_with_metrics(F.linear(hidden, weight, bias), targets, **options)
    output = fused.linear_cross_entropy_with_metrics(*inputs, chunk_rows=4, **options)
    torch.testing.assert_close(tuple(output), tuple(expected))
    torch.testing.assert_close(chunked(*inputs, chunk_rows=4, **options), expected.loss)
    assert not any(one.requires_grad for one in output[1:])
    g = torch.randn_like(expected.loss)
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    theirs = gradients(expected.loss, inputs, g)
    torch.testing.assert_close(gradients(output.loss, inputs, g, retain_graph=True), theirs, **tolerance)
    torch.testing.assert_close(gradients(output.loss, inputs, g), theirs, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(
            tuple(fused.linear_cross_entropy_with_metrics(*inputs, chunk_rows=4, **options)),
            tuple(one.detach() for one in output),
        )


def test_metrics_take_no_whole_logits_and_no_second_pass(monkeypatch):
    seen = []
    run = LOSS.run
    monkeypatch.setattr(
        LOSS,
        "run",
        lambda part, args, *rest, **statics: seen.append(args[0].shape) or run(part, args, *rest, **statics),
    )
    inputs = operands()
    options = {"chunk_rows": 4, "token_scaling": True}
    expected = fused.linear_cross_entropy_with_metrics(*inputs, **options)
    assert seen == [torch.Size((rows, 13)) for rows in (4, 4, 4, 4, 3, 3)], "forward and gradient of each chunk"
    seen.clear()
    torch._dynamo.reset()
    compiled = torch.compile(fused.linear_cross_entropy_with_metrics, fullgraph=True, backend="aot_eager")
    output = compiled(*inputs, **options)
    torch.testing.assert_close(tuple(output), tuple(expected))
    torch.testing.assert_close(gradients(output.loss, inputs), gradients(expected.loss, inputs))
    assert not any(one.requires_grad for one in output[1:])
    assert seen and all(shape in [(4, 13), (3, 13)] for shape in seen)


def test_metrics_of_no_rows():
    output = fused.linear_cross_entropy_with_metrics(torch.randn(0, 8), torch.randn(37, 8), torch.zeros(0).long())
    assert output.loss.isnan() and output.token_accuracy.isnan() and output.predicted_tokens.shape == (0,)
