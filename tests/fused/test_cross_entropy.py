"""cross_entropy against F.cross_entropy and HuggingFace; what holds for every op is tested by the table."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import fused


def sample(*shape, classes=10, dtype=torch.float64):
    torch.manual_seed(0)
    logits = (3 * torch.randn(*shape, classes)).to(dtype).requires_grad_()
    targets = torch.randint(classes, shape)
    targets.view(-1)[1::4] = -100
    return logits, targets


def grad(result, logits):
    return torch.autograd.grad(result.sum(), logits)[0]


def test_wrong_variants_are_told_apart():
    logits, targets = sample(8)
    ours = fused.cross_entropy(logits, targets, label_smoothing=0.1)
    for mutant in (
        F.cross_entropy(logits, targets),
        F.cross_entropy(logits, targets, label_smoothing=0.1 * 10 / 9),
        F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum") / 8,
        F.cross_entropy(logits, targets.clamp(min=0), label_smoothing=0.1),
        F.cross_entropy(logits * 1.001, targets, label_smoothing=0.1),
    ):
        assert not torch.allclose(ours, mutant, rtol=1e-6)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_huggingfaces_loss_is_expressible(items):
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    logits, labels = sample(2, 5, dtype=torch.bfloat16)
    expected = loss_utils.ForCausalLMLoss(logits, labels, 10, num_items_in_batch=items)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    if items is None:
        ours = fused.cross_entropy(logits, shifted)
    else:
        ours = fused.cross_entropy(logits, shifted, reduction="sum") / items
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(grad(ours, logits), grad(expected, logits))


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3])
def test_any_number_may_stand_for_ignored(ignore_index):
    logits, targets = sample(3, 7)
    targets = torch.where(targets == -100, ignore_index, targets)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index)
    ours = fused.cross_entropy(logits, targets.int(), ignore_index=ignore_index)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(grad(ours, logits), grad(expected, logits))


def test_a_single_row_and_none_at_all():
    logits, targets = sample(1)
    torch.testing.assert_close(fused.cross_entropy(logits[0], targets[0]), F.cross_entropy(logits[0], targets[0]))
    logits, targets = sample(4)
    ignored = torch.full_like(targets, -100)
    ours = fused.cross_entropy(logits, ignored)
    assert ours.isnan()
    assert not grad(ours, logits).any()
    assert fused.cross_entropy(logits, ignored, reduction="sum") == 0
    assert not fused.cross_entropy(logits, ignored, reduction="none", z_loss=1.0).any()


def test_logits_far_from_zero():
    logits, targets = sample(8, dtype=torch.float32)
    for shift in (1e4, -1e4):
        far = (logits.detach() + shift).requires_grad_()
        expected = F.cross_entropy(far, targets)
        ours = fused.cross_entropy(far, targets)
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=0)
        torch.testing.assert_close(grad(ours, far), grad(expected, far), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_gradients_of_infinities_are_as_in_eager(value, backend, warm_inductor):
    logits, targets = sample(8, dtype=torch.float32)
    with torch.no_grad():
        logits[0, 3] = logits[2] = value
    expected = F.cross_entropy(logits, targets, reduction="none")
    with fused.backend(backend):
        ours = fused.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(ours, expected, equal_nan=True)
        torch.testing.assert_close(grad(ours, logits), grad(expected, logits), equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01}], ids=["", "all"])
def test_inplace_backward_writes_over_the_logits(backend, dtype, options, warm_inductor):
    leaf, targets = sample(3, 40, dtype=dtype)
    logits = leaf * 1
    expected = grad(fused.cross_entropy(leaf, targets, **options), leaf)
    with fused.backend(backend):
        loss = fused.cross_entropy(logits, targets, inplace_backward=True, **options)
        seen = []
        logits.register_hook(seen.append)
        got = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    torch.testing.assert_close(got, expected)
    assert seen[0].data_ptr() == logits.data_ptr()
    assert torch.equal(logits.detach(), seen[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf)


def test_inplace_backward_spares_logits_that_are_needed():
    leaf, targets = sample(6)
    with pytest.raises(ValueError, match="are a leaf"):
        fused.cross_entropy(leaf, targets, inplace_backward=True)
    # Recorded for another backward pass.
    logits = leaf * 1
    before = logits.detach().clone()
    loss = fused.cross_entropy(logits, targets, inplace_backward=True)
    torch.autograd.grad(loss, leaf, create_graph=True)
    assert torch.equal(logits.detach(), before)
    # Expanded: several rows in one place.
    expanded = (leaf[:1] * 1).expand(6, 10)
    ours = fused.cross_entropy(expanded, targets, inplace_backward=True)
    torch.testing.assert_close(grad(ours, leaf), grad(F.cross_entropy(leaf[:1].expand(6, 10), targets), leaf))
    # Another one saved them: autograd says so.
    logits = leaf * 1
    squares = logits.square().sum()
    both = squares + fused.cross_entropy(logits, targets, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()


def test_targets_out_of_range():
    logits, targets = sample(2, 3)
    for wrong in (10, -1):
        targets[1, 2] = wrong
        with pytest.raises(IndexError, match=rf"target {wrong} at \[1, 2\] is out of range: there are 10 classes"):
            fused.cross_entropy(logits, targets)
        compiled = torch.compile(fused.cross_entropy, backend="eager")(logits, targets, reduction="none")
        assert compiled.isnan().nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"ignore_index": 3}])
def test_weights_of_the_classes(reduction, options):
    logits, targets = sample(2, 3)
    targets = targets.clamp(0) if "ignore_index" in options else targets
    weight = torch.rand(10, dtype=logits.dtype)
    weight[1] = 0
    mine, theirs = logits.detach().requires_grad_(), logits.detach().flatten(0, 1).requires_grad_()
    result = fused.cross_entropy(mine, targets, class_weight=weight, reduction=reduction, **options)
    expected = F.cross_entropy(theirs, targets.flatten(), weight, reduction=reduction, **options)
    torch.testing.assert_close(result.flatten(), expected.flatten())
    (gradient,) = torch.autograd.grad(result.sum(), mine)
    torch.testing.assert_close(gradient.flatten(0, 1), torch.autograd.grad(expected.sum(), theirs)[0])


def test_the_z_loss_has_no_class_weight():
    logits, targets = sample(2, 3)
    weight = torch.rand(10, dtype=logits.dtype)
    squares = torch.where(targets == -100, 0, torch.logsumexp(logits, -1).square())
    plain = fused.cross_entropy(logits, targets, class_weight=weight, reduction="none")
    result = fused.cross_entropy(logits, targets, class_weight=weight, z_loss=0.5, reduction="none")
    torch.testing.assert_close(result, plain + 0.5 * squares)


def test_errors_say_what_to_do():
    logits, targets = sample(2, 3)
    with pytest.raises(TypeError, match=r"class numbers.*for class probabilities use torch"):
        fused.cross_entropy(logits, torch.softmax(logits, -1))
    with pytest.raises(TypeError, match="logits must be float16"):
        fused.cross_entropy(targets, targets)
    with pytest.raises(TypeError, match="targets must be a tensor, got list"):
        fused.cross_entropy(logits, [1, 2])
    with pytest.raises(ValueError, match=r"targets of shape \[3\] are not one for each row.*\[2, 3, 10\].*\[2, 3\]"):
        fused.cross_entropy(logits, targets[0])
    with pytest.raises(ValueError, match="have no columns"):
        fused.cross_entropy(torch.empty(2, 0), targets[:, 0])
    for weight, error, text in (
        (torch.ones(9), ValueError, r"class_weight must be \[10\], one for each class, got \[9\]"),
        (torch.ones(10, dtype=torch.int64), TypeError, "class_weight must be float16"),
        (torch.ones(10, device="meta"), ValueError, "is on meta"),
        (torch.ones(10, requires_grad=True), ValueError, "gets no gradient; pass class_weight.detach"),
    ):
        with pytest.raises(error, match=text):
            fused.cross_entropy(logits, targets, class_weight=weight)
    for name, value in (("label_smoothing", 1.5), ("z_loss", -1.0), ("softcap", 0.0), ("reduction", "batchmean")):
        with pytest.raises(ValueError, match=f"cross_entropy: {name} must be"):
            fused.cross_entropy(logits, targets, **{name: value})


def test_compiled_by_torch_no_gradient_is_scattered_into_zeros(values_and_gradients):
    """The gradient of `gather` would be one more tensor of the size of the logits, written for itself."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    logits, targets = torch.randn(6, 40), torch.randint(0, 40, (6,))
    targets[2] = -100
    for options in ({}, {"label_smoothing": 0.1, "softcap": 3.0}):
        function = partial(fused.cross_entropy, targets=targets, **options)
        compiled = torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
        expected = values_and_gradients(function, torch.tensor(1.0), logits)
        torch.testing.assert_close(values_and_gradients(compiled, torch.tensor(1.0), logits), expected)
    assert len(graphs) == 4 and not any("gather" in graph or "scatter" in graph for graph in graphs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", ["reference", "inductor", "triton"])
@pytest.mark.parametrize("offset", [1e3, 1e5, -1e7])
def test_logits_far_from_zero_lose_no_digits(backend, offset):
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 9000) + offset, torch.randint(9000, (4,))
    for options in ({}, {"label_smoothing": 0.1}):
        found = []
        for x, function in (
            (logits, lambda x, options=options: fused.cross_entropy(x, targets, reduction="none", **options)),
            (logits.double(), lambda x, options=options: F.cross_entropy(x, targets, reduction="none", **options)),
        ):
            leaf = x.detach().requires_grad_()
            with fused.backend(backend):
                losses = function(leaf)
                found.append((losses.detach().float(), torch.autograd.grad(losses.sum(), leaf)[0].float()))
        torch.testing.assert_close(*found, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "inductor", "triton"])
def test_a_row_of_the_lowest_number_is_uniform(backend):
    logits = torch.full((2, 8), torch.finfo(torch.float32).min)
    logits[1, 3:] = 0.0
    with fused.backend(backend):
        losses = fused.cross_entropy(logits, torch.tensor([5, 5]), reduction="none")
    torch.testing.assert_close(losses, torch.tensor([8.0, 5.0]).log())


def expected_output(logits, targets, weight=None, *, token_scaling=False, **options):
    """What cross_entropy_with_metrics returns, in eager, for rows of logits."""
    ignored, reduction = options.get("ignore_index", -100), options.get("reduction", "mean")
    z = logits if "softcap" not in options else options["softcap"] * torch.tanh(logits / options["softcap"])
    smoothing = {"label_smoothing": options.get("label_smoothing", 0.0), "ignore_index": ignored}
    counted = targets != ignored
    squares = torch.where(counted, options.get("z_loss", 0.0) * torch.logsumexp(z, -1).square(), 0)
    losses = F.cross_entropy(z, targets, weight, reduction="none", **smoothing) + squares
    if token_scaling:
        scale = torch.softmax(z, -1).gather(1, targets.where(counted, 0)[:, None])[:, 0].detach()
        losses, squares = losses * scale, squares * scale
    count = 1
    if reduction == "mean":
        count = torch.where(counted, 1 if weight is None else weight[targets.where(counted, 0)], 0).sum()
    if reduction != "none":
        losses, squares = losses.sum() / count, squares.sum() / count
    predicted = torch.where(counted, logits.argmax(-1), -1)
    accuracy = (predicted == targets)[counted].float().mean()
    return fused.CrossEntropyOutput(losses, squares.detach(), accuracy, predicted)


ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "ignore_index": 3, "token_scaling": True}


def ties(dtype=torch.float64):
    """Logits of few values, so that rows have several highest ones."""
    logits, targets = sample(24, dtype=dtype)
    logits = logits.detach().round()
    targets[::3] = logits[::3].argmax(-1)
    return logits.requires_grad_(), torch.where(targets == -100, 3, targets)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"token_scaling": True}, {"z_loss": 0.01}, ALL_OPTIONS], ids=str)
def test_metrics_are_those_of_eager(reduction, weighted, options):
    logits, targets = ties()
    weight = torch.rand(10, dtype=logits.dtype) if weighted else None
    expected = expected_output(logits, targets, weight, reduction=reduction, **options)
    output = fused.cross_entropy_with_metrics(logits, targets, class_weight=weight, reduction=reduction, **options)
    torch.testing.assert_close(tuple(output), tuple(expected))
    torch.testing.assert_close(grad(output.loss, logits), grad(expected.loss, logits))
    alone = fused.cross_entropy(logits, targets, class_weight=weight, reduction=reduction, **options)
    assert torch.equal(alone, output.loss)
    assert not any(one.requires_grad for one in output[1:])
    assert 0 < output.token_accuracy < 1


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
        ("inductor", torch.bfloat16),
        ("triton", torch.float32),
    ],
    ids=str,
)
def test_metrics_of_every_backend(backend, dtype, warm_inductor):
    logits, targets = ties(dtype)
    expected = expected_output(logits.float(), targets, **ALL_OPTIONS)
    with fused.backend(backend):
        output = fused.cross_entropy_with_metrics(logits.unflatten(0, (4, 6)), targets.view(4, 6), **ALL_OPTIONS)
        gradient = grad(output.loss, logits)
    torch.testing.assert_close(tuple(output), (*expected[:3], expected.predicted_tokens.view(4, 6)))
    torch.testing.assert_close(gradient, grad(expected.loss, logits))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_the_predicted_token_of_long_rows(backend):
    logits = torch.randn(5, 9000)
    for row, columns in enumerate(([0], [8999], [8500, 8700], [17, 8191, 8192])):
        logits[row, columns] = 50.0
    logits[4] = -torch.inf
    with fused.backend(backend):
        output = fused.cross_entropy_with_metrics(logits, torch.tensor([0, 1, 8500, 2, 5]), softcap=3.0)
    assert output.predicted_tokens.tolist() == [0, 8999, 8500, 17, 0]
    assert output.token_accuracy == torch.tensor(2 / 5)


def test_metrics_of_no_rows():
    logits, targets = sample(4)
    for some in (slice(0), slice(None)):
        output = fused.cross_entropy_with_metrics(logits[some], torch.full_like(targets, -100)[some], z_loss=1.0)
        assert output.loss.isnan() and output.z_loss.isnan() and output.token_accuracy.isnan()
        assert output.predicted_tokens.tolist() == [-1] * len(logits[some])


def test_metrics_under_transforms():
    logits, targets = ties()

    def function(logits, targets):
        loss, *metrics = fused.cross_entropy_with_metrics(logits, targets, **ALL_OPTIONS)
        return loss, metrics

    loss, metrics = function(logits, targets)
    _, of_halves = torch.func.vmap(function)(logits.view(2, 12, -1), targets.view(2, 12))
    assert torch.equal(of_halves[2].flatten(), metrics[2])
    result = torch.func.grad(function, has_aux=True)(logits.detach(), targets)
    torch.testing.assert_close(result, (grad(loss, logits), metrics))
    torch._dynamo.reset()
    compiled, of_compiled = torch.compile(function, backend="eager", fullgraph=True)(logits, targets)
    torch.testing.assert_close((compiled, of_compiled), (loss, metrics))
    assert not any(one.requires_grad for one in of_compiled)


def test_token_scaling_keeps_its_scale_for_the_backward_pass():
    logits, targets = sample(16, dtype=torch.float32)
    seen = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
        fused.cross_entropy(logits, targets, token_scaling=True)
    assert sum(t.nbytes for t in seen.values()) == logits.nbytes + targets.nbytes + 3 * 4 * 16 + 8
