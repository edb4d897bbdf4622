"""The batch norm beside torch's own, and folded into the layer before it. Quality lines: `cases_batch_norm.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fused
from tests.fused.cases_activations import EAGER

Tensor = torch.Tensor
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat([x, x], 1)[:, ::2],
}


def rows(channels: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Running mean and variance, weight and bias."""
    torch.manual_seed(1)
    return [torch.randn(channels, dtype=dtype), *(torch.rand(channels, dtype=dtype) + 0.5 for _ in range(3))]


def step(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    given = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*given)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return result, *torch.autograd.grad((result * weights).sum(), given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["relu", "hard_swish", "gelu", None])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_layouts_activations_and_modes(layout: str, activation: str | None, training: bool, added: bool) -> None:
    torch.manual_seed(0)
    x, residual = (LAYOUTS[layout](torch.randn(3, 6, 4, 5, dtype=torch.float64)) for _ in range(2))
    after = EAGER[activation] if activation else lambda z: z
    statistics = [rows(6)[:2] for _ in range(2)]

    def ours(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        options = {"residual": residual} if added else {}
        return fused.batch_norm(x, *statistics[0], weight, bias, training, 0.3, activation=activation, **options)

    def theirs(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        z = F.batch_norm(x, *statistics[1], weight, bias, training, 0.3)
        return after(z + residual if added else z + 0 * residual)

    if not added:
        residual = residual[:, :, :1, :1]
        ours_alone = ours

        def ours(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
            return ours_alone(x, weight, bias, residual) + 0 * residual

    mine, eager = step(ours, x, *rows(6)[2:], residual), step(theirs, x, *rows(6)[2:], residual)
    torch.testing.assert_close(mine, eager)
    assert all(torch.equal(one, other) for one, other in zip(*statistics, strict=True))
    if added or activation is None:
        assert mine[0].stride() == eager[0].stride()


@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_the_statistics_on_each_backend(backend: str, layout: str) -> None:
    torch.manual_seed(0)
    ours, theirs, count = rows(6, torch.float32)[:2], rows(6, torch.float32)[:2], torch.tensor(0)
    weight, bias = rows(6, torch.float32)[2:]
    with fused.backend(backend):
        for _ in range(3):
            x = LAYOUTS[layout](torch.randn(3, 6, 4, 5) * 2 + 1)
            given = (weight, bias, True, 0.2)
            mine = step(
                lambda x, given=given: fused.batch_norm(x, *ours, *given, num_batches_tracked=count, activation="silu"),
                x,
            )
            eager = step(lambda x, given=given: F.silu(F.batch_norm(x, *theirs, *given)), x)
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours, theirs)
            assert mine[0].stride() == eager[0].stride()
    assert count == 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_one_sample_with_a_gradient_in_channels_last(training: bool, activation: str | None) -> None:
    """Of ``flatten(2).transpose(1, 2)``, where torch's own kernel is wrong."""
    torch.manual_seed(0)
    x, g = torch.randn(1, 6, 4, 5, dtype=torch.float64, requires_grad=True), torch.randn(1, 20, 6, dtype=torch.float64)
    mean, variance, *parameters = rows(6)
    weight, bias = (row.requires_grad_() for row in parameters)
    of_statistics = (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)) if training else (mean, variance)
    center, spread = (row.view(1, 6, 1, 1) for row in of_statistics)
    expected = (x - center) * torch.rsqrt(spread + 1e-5) * weight.view(1, 6, 1, 1) + bias.view(1, 6, 1, 1)
    expected = EAGER[activation](expected) if activation else expected
    result = fused.batch_norm(x, mean.clone(), variance.clone(), weight, bias, training, activation=activation)
    gradients = [
        torch.autograd.grad(each.flatten(2).transpose(1, 2), (x, weight, bias), g) for each in (result, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_the_average_of_all_batches() -> None:
    norm = torch.nn.BatchNorm1d(4, momentum=None)
    mean, variance, count = torch.zeros(4), torch.ones(4), torch.tensor(0)
    for _ in range(4):
        x = torch.randn(5, 4)
        mine = fused.batch_norm(
            x, mean, variance, norm.weight, norm.bias, True, None, num_batches_tracked=count, activation="relu"
        )
        torch.testing.assert_close(mine, norm(x).relu())
    torch.testing.assert_close((mean, variance, count), (norm.running_mean, norm.running_var, norm.num_batches_tracked))


def test_a_backward_pass_after_the_statistics_changed() -> None:
    """They are not saved, so a training step in between changes no gradient."""
    x, (mean, variance, weight, bias) = torch.randn(3, 4, 5, requires_grad=True), rows(4, torch.float32)
    result = fused.batch_norm(x, mean, variance, weight, bias, activation="silu")
    twin = F.silu(F.batch_norm(x, mean.clone(), variance.clone(), weight, bias))
    fused.batch_norm(torch.randn(3, 4, 5), mean, variance, training=True)
    gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (result, twin)]
    torch.testing.assert_close(*gradients)


def test_a_residual_that_does_not_broadcast_is_torchs_error_after_the_update() -> None:
    x, mine = torch.randn(2, 6, 4), rows(6, torch.float32)[:2]
    theirs = [each.clone() for each in mine]
    with pytest.raises(RuntimeError, match="must match the size"):
        fused.batch_norm(x, *mine, training=True, residual=torch.ones(2, 5, 4))
    F.batch_norm(x, *theirs, training=True)
    assert all(map(torch.equal, mine, theirs))


def test_a_residual_that_broadcasts_is_added_by_torch() -> None:
    x, (mean, variance, *_) = torch.randn(3, 4, 5), rows(4, torch.float32)
    residual = torch.randn(2, 3, 4, 5)
    mine = fused.batch_norm(x, mean, variance, activation="relu", residual=residual)
    torch.testing.assert_close(mine, F.relu(F.batch_norm(x, mean, variance) + residual))


@pytest.mark.parametrize(
    ("shape", "options", "error", "text"),
    [
        ((6,), {}, ValueError, "at least 2 dimension"),
        ((2, 6, 4), {"weight": torch.ones(4)}, ValueError, r"weight must have shape \[6\]"),
        ((2, 6, 4), {"running_var": None}, ValueError, "both running_mean and running_var"),
        ((2, 6, 4), {"activation": "swish"}, ValueError, "there is no activation 'swish'; there are relu"),
        ((2, 6, 4), {"eps": "small"}, TypeError, "eps must be a number"),
        ((2, 6, 4), {"training": True, "momentum": None}, ValueError, "needs num_batches_tracked"),
        ((1, 6, 1), {"training": True}, ValueError, "more than 1 value per channel"),
        ((2, 6, 4), {"residual": torch.ones(2, 6, 4, dtype=torch.int64)}, TypeError, "residual must be float"),
    ],
)
def test_errors_before_any_update(shape: tuple, options: dict, error: type[Exception], text: str) -> None:
    state = {"running_mean": torch.zeros(6), "running_var": torch.ones(6)}
    count = torch.tensor(0)
    given = {**state, **options}
    if "momentum" not in options:
        given["num_batches_tracked"] = count
    with pytest.raises(error, match=text):
        fused.batch_norm(torch.randn(shape), **given)
    assert count == 0
    assert not state["running_mean"].any()


# -- folded ---------------------------------------------------------------------------------------------------

CONVOLUTIONS = [
    ((4, 3, 9), (6, 3, 3), {"padding": 1}),
    ((2, 3, 8, 7), (6, 3, 3, 3), {"stride": (2, 1), "padding": (1, 0)}),
    ((2, 4, 8, 7), (6, 2, 3, 3), {"groups": 2, "dilation": 2}),
    ((2, 3, 5, 6, 4), (6, 3, 2, 2, 2), {}),
    ((1, 3, 3, 3), (6, 3, 3, 3), {"padding": "same"}),  # more weights than results
    ((1, 30, 3, 3), (6, 30, 3, 3), {}),
]
CONVOLVE = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


@pytest.mark.parametrize(("image", "kernel", "options"), CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_folded_into_a_convolution(
    image: tuple, kernel: tuple, options: dict, differentiable: bool, plain: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(image, dtype=torch.float64), torch.randn(kernel, dtype=torch.float64)
    statistics, parameters, bias = rows(6)[:2], rows(6)[2:], torch.randn(6, dtype=torch.float64)
    if plain:
        parameters, bias = [None, None], None

    def eager(x: Tensor) -> Tensor:
        z = CONVOLVE[x.ndim](x, weight, bias, **options)
        z = F.batch_norm(z, *statistics, *parameters, eps=1e-3)
        return z if plain else F.relu(z + 0.5)

    def ours(x: Tensor) -> Tensor:
        others = {} if plain else {"activation": "relu", "residual": torch.full((1,), 0.5, dtype=torch.float64)}
        given = (x, weight, bias, *statistics, *parameters, 1e-3)
        return fused.conv_batch_norm(*given, **options, **others)

    if differentiable:
        torch.testing.assert_close(step(ours, x), step(eager, x))
        weight.requires_grad_()
        torch.testing.assert_close(*(torch.autograd.grad(each(x).square().sum(), weight)[0] for each in (ours, eager)))
    else:
        torch.testing.assert_close(ours(x), eager(x))
        assert ours(x).stride() == eager(x).stride()


def test_folded_into_a_linear_layer() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(50, 3), torch.randn(6, 3), torch.randn(6)
    mean, variance, gamma, beta = rows(6, torch.float32)
    mine = fused.linear_batch_norm(x, weight, bias, mean, variance, gamma, beta, activation="silu")
    torch.testing.assert_close(mine, F.silu(F.batch_norm(F.linear(x, weight, bias), mean, variance, gamma, beta)))


def test_folding_takes_one_pass_over_the_smaller_side() -> None:
    """The weights of a late layer are more than its results: these are normalized then."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        observes_only = True

        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.mul.Tensor:
                self.sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    weight, (mean, variance, gamma, beta) = torch.randn(6, 3, 3, 3), rows(6, torch.float32)
    for width, folded in ((16, True), (3, False)):
        with torch.no_grad(), Products() as products:
            fused.conv_batch_norm(torch.randn(1, 3, width, width), weight, None, mean, variance, gamma, beta)
        assert (weight.numel() in products.sizes) is folded


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"weight": torch.randn(6, 3, 3)}, ValueError, "no convolution of"),
        ({"running_mean": torch.zeros(3)}, ValueError, r"running_mean must have shape \[6\]"),
        ({"norm_bias": torch.zeros(2, 3)}, ValueError, r"norm_bias must have shape \[6\]"),
        ({"activation": "swish"}, ValueError, "there is no activation 'swish'"),
        ({"x": torch.ones(1, 3, 4, 4, dtype=torch.int64)}, TypeError, "input must be float"),
    ],
)
def test_errors_of_folding(changes: dict, error: type[Exception], text: str) -> None:
    given = {
        "x": torch.randn(1, 3, 4, 4),
        "weight": torch.randn(6, 3, 3, 3),
        "bias": None,
        "running_mean": torch.zeros(6),
        "running_var": torch.ones(6),
    }
    with pytest.raises(error, match=text):
        fused.conv_batch_norm(**{**given, **changes})


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("training", [True, False])
def test_sums_of_many_values_on_inductor_are_as_close_as_those_of_eager(
    warm_inductor: None, layout: str, training: bool
) -> None:
    torch.manual_seed(0)
    x, g = (LAYOUTS[layout](torch.randn(64, 8, 14, 14)) for _ in range(2))
    statistics = rows(8, torch.float32)

    def gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        mean, var, *parameters = (each.to(dtype) for each in statistics)
        parameters = [each.requires_grad_() for each in parameters]
        return torch.autograd.grad(function(x.to(dtype), mean, var, *parameters, training), parameters, g.to(dtype))

    def error(of: tuple[Tensor, ...]) -> float:
        return sum(float((each.double() - one).square().sum()) for each, one in zip(of, exact, strict=True)) ** 0.5

    def eager(*args: Any) -> Tensor:
        return F.relu(F.batch_norm(*args))

    exact = gradients(eager, torch.float64)
    with fused.backend("inductor"):
        ours = gradients(lambda *args: fused.batch_norm(*args, activation="relu"), torch.float32)
    assert error(ours) <= 2 * error(gradients(eager, torch.float32))
