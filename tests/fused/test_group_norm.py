"""The group norm beside torch's own; `cases_group_norm.py` has the quality lines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fused
from tests.fused.cases_group_norm import eager_group_norm

Tensor = torch.Tensor


@pytest.fixture
def given() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((3, 6, 4, 5), (6,), (6,), (3, 6, 1, 1), (1, 6, 1, 1))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def step(function: object, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result = function(*tensors)  # type: ignore[operator]
    return result, *torch.autograd.grad((result * torch.arange(float(result.shape[-1]))).sum(), tensors)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu_tanh", "tanh", None])
@pytest.mark.parametrize("scaled", [False, True])
def test_layouts_and_activations(
    given: tuple[Tensor, ...], layout: torch.memory_format, activation: str | None, scaled: bool
) -> None:
    functions = {
        "silu": F.silu,
        "relu": F.relu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "tanh": torch.tanh,
    }
    after = functions.get(str(activation), lambda z: z)

    def ours(x: Tensor, *rest: Tensor) -> Tensor:
        factors = dict(zip(("scale", "shift"), rest[2:], strict=False))
        return fused.group_norm(x, 2, *rest[:2], activation=activation, **factors)

    x = given[0].detach().contiguous(memory_format=layout).requires_grad_()
    tensors = (x, *given[1:]) if scaled else (x, *given[1:3])
    mine, theirs = step(ours, tensors), step(lambda *all_: after(eager_group_norm(*all_)), tensors)
    torch.testing.assert_close(mine, theirs)
    assert mine[0].stride() == theirs[0].stride()


def test_one_sample_in_channels_last(given: tuple[Tensor, ...]) -> None:
    x = given[0].detach()[:1].contiguous(memory_format=torch.channels_last).requires_grad_()
    tensors = (x, *(each.detach()[: len(each) if each.ndim == 1 else 1].requires_grad_() for each in given[1:]))
    mine = step(lambda x, w, b, s, t: fused.group_norm(x, 2, w, b, activation="silu", scale=s, shift=t), tensors)
    torch.testing.assert_close(mine, step(lambda *all_: F.silu(eager_group_norm(*all_)), tensors))


@pytest.mark.parametrize("shape", [(1, 6, 4, 5), (2, 6, 1, 1), (1, 6, 1, 3), (2, 6, 1, 4)])
def test_strides_that_fit_two_layouts(shape: tuple[int, ...]) -> None:
    samples, channels, height, width = shape
    rows = torch.randn(samples, height * width, channels, dtype=torch.float64)
    weight = torch.randn(channels, dtype=torch.float64)
    factors = {"scale": torch.randn(samples, channels, 1, 1, dtype=torch.float64)}
    for x in (
        rows.transpose(1, 2).reshape(shape),
        rows.transpose(1, 2).unflatten(2, (height, width)),
        rows.transpose(0, 1).contiguous().permute(1, 2, 0).unflatten(2, (height, width)),
        rows.view(samples, height, width, channels).permute(0, 3, 1, 2),
        rows.view(samples, height, width, channels).permute(0, 3, 1, 2).as_strided(shape, (channels, 1, 1, 1)),
    ):
        for given in ({}, factors):
            mine = fused.group_norm(x, 2, weight, activation="silu", **given)
            theirs = F.silu(eager_group_norm(x, weight, None, *given.values()))
            torch.testing.assert_close(mine, theirs)
            strides = [(mine.stride(dim), theirs.stride(dim)) for dim in range(4) if shape[dim] > 1]
            assert all(one == other for one, other in strides)


def test_other_scales_are_applied_by_torch(given: tuple[Tensor, ...]) -> None:
    x, weight, bias, *_ = given
    scale, shift = torch.randn(2, 3, 6, 4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    for factors in (
        {"scale": scale[0]},
        {"shift": shift},
        {"scale": scale, "shift": shift},
        {"scale": scale[0, :, :1]},
    ):
        mine = fused.group_norm(x, 2, weight, bias, activation="silu", **factors)
        torch.testing.assert_close(
            mine, F.silu(eager_group_norm(x, weight, bias, factors.get("scale"), factors.get("shift")))
        )


def test_a_large_mean_loses_no_more_than_in_torch(given: tuple[Tensor, ...]) -> None:
    x, weight, bias = (each.detach().float() for each in given[:3])
    tensors = tuple(each.requires_grad_() for each in (x + 1000, weight, bias))
    doubled = tuple(each.detach().double().requires_grad_() for each in tensors)
    exact, eager = (step(lambda *all_: F.silu(eager_group_norm(*all_)), each) for each in (doubled, tensors))
    mine = step(lambda x, w, b: fused.group_norm(x, 2, w, b, activation="silu"), tensors)
    for ours, theirs, truth in zip(mine, eager, exact, strict=True):
        assert (ours - truth).abs().max() <= 1.1 * (theirs - truth).abs().max() + 1e-6


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (((2, 6, 4), 4), {}, ValueError, "4 groups do not divide the 6 channels"),
        (((2, 6, 4), 0), {}, ValueError, "0 groups do not divide"),
        (((6,), 2), {}, ValueError, "at least 2 dimension"),
        (((2, 6, 4), 2, (4,)), {}, ValueError, r"weight must have shape \[6\]"),
        (((2, 6, 4), 2, (6,), (6, 1)), {}, ValueError, r"bias must have shape \[6\]"),
        (((2, 6, 4), 2), {"scale": (2, 5, 1)}, ValueError, "do not broadcast"),
        (((2, 6, 4), 2), {"activation": "softsign"}, ValueError, "there is no activation 'softsign'; there are relu"),
        (((2, 6, 4), 2, None, None, "small"), {}, TypeError, "eps must be a number"),
    ],
)
def test_errors(arguments: tuple, options: dict, error: type[Exception], text: str) -> None:
    def made(value: object) -> object:
        return torch.randn(value) if isinstance(value, tuple) else value

    with pytest.raises(error, match=text):
        fused.group_norm(*map(made, arguments), **{key: made(value) for key, value in options.items()})


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="must be float16"):
        fused.group_norm(torch.ones(2, 4, 3, dtype=torch.int64), 2)
