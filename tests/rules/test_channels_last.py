"""Folded convolutions with the channels last inside of a graph, and sums written to their residual."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fused
import schedule
from schedule.runtime.scheduled import state_of
from tests.rules.batch_norms import fallbacks, randomized

CHANNELS = 4


class Layer(nn.Module):
    """A convolution with a batch norm."""

    def __init__(self, inputs: int = CHANNELS) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Classifier(nn.Module):
    """Convolutions with a residual sum, then a given head."""

    def __init__(self, head: Callable[[Classifier, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.stem, self.first, self.second = Layer(3), Layer(), Layer()
        self.pool, self.linear, self.plain = nn.MaxPool2d(2), nn.Linear(CHANNELS, 2), nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.head = head

    def forward(self, x: Tensor) -> Any:
        h = self.pool(F.relu(self.stem(x)))
        return self.head(self, h, F.relu(self.second(F.relu(self.first(h))) + h))


def pooled(model: Classifier, h: Tensor, y: Tensor) -> Tensor:
    return model.linear(F.adaptive_avg_pool2d(model.plain(y), 1).flatten(1))


def images(samples: int = 2, width: int = 8) -> Tensor:
    return torch.randn(samples, 3, width, 6)


def optimized(model: nn.Module, x: Tensor) -> tuple[nn.Module, nn.Module, list[fx.Node]]:
    """The model with a flat graph, a twin left as it is, and the folded convolutions in evaluation."""
    model = randomized(model).eval()
    for parameter in model.parameters():
        parameter.data.mul_(0.1)
    twin = copy.deepcopy(model)
    sch = schedule.create_schedule(model, x).trace(flatten=True)
    schedule.optimize(sch, rules="inference", cost_guard=False)
    (graph,) = [made.graph for made in state_of(model).specializations if not made.training]
    return model, twin, [node for node in graph.nodes if node.target is fused.conv_batch_norm]


def assert_equal(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    before = x.clone()
    with torch.no_grad(), fused.backend("auto"):
        ours, theirs = model(x), twin(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if isinstance(ours, Tensor):
        assert ours.stride() == theirs.stride()
    assert torch.equal(x, before)


def test_a_classifier_runs_with_channels_last() -> None:
    torch.manual_seed(0)
    model, twin, (stem, first, second) = optimized(Classifier(pooled), images())
    assert stem.kwargs["channels_last"] == (2, 3, 8, 6)
    assert not {"channels_last", "out"} & first.kwargs.keys()
    assert second.kwargs["out"] is second.kwargs["residual"] and "channels_last" not in second.kwargs
    for x in (images(), images(5), images(1), images(2, 10), images().to(memory_format=torch.channels_last)):
        assert_equal(model, twin, x)
    x = images().requires_grad_()
    both = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (model, twin)]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-6)
    assert fallbacks(model) == 0


def test_hooks_registered_later_see_what_eager_gives() -> None:
    torch.manual_seed(0)
    for name in ("pool", "second"):
        model, twin, _ = optimized(Classifier(pooled), images())
        seen: list[Tensor] = []
        for each in (model, twin):
            each.get_submodule(name).register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        for _ in range(2):  # the second by a graph with a call of the pool; the convolution was in the graph
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", schedule.FallbackWarning)
                assert_equal(model, twin, images())
            torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)
            assert seen[0].stride() == seen[1].stride(), name
            seen.clear()


def viewed(model: Classifier, h: Tensor, y: Tensor) -> Tensor:
    return y.view(len(y), -1).sum(-1)


def returned(model: Classifier, h: Tensor, y: Tensor) -> Tensor:
    return y


def strides(model: Classifier, h: Tensor, y: Tensor) -> Any:
    return pooled(model, h, y), y.stride()


def rows(model: Classifier, h: Tensor, y: Tensor) -> Tensor:
    return model.linear(y.reshape(-1, CHANNELS))


@pytest.mark.parametrize("head", [viewed, returned, strides])
def test_results_that_are_told_apart_stay_as_they_are(head: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, twin, (stem, *_) = optimized(Classifier(head), images())
    assert "channels_last" not in stem.kwargs
    for x in (images(), images(5)):
        assert_equal(model, twin, x)


def test_the_values_of_a_reshape_are_those_of_eager() -> None:
    torch.manual_seed(0)
    model, twin, _ = optimized(Classifier(rows), images())
    assert_equal(model, twin, images())


def test_trying_both_layouts_changes_no_state() -> None:
    after = (nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm2d(CHANNELS), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(*Layer(3).children(), *after)
    x, before = images(), copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    schedule.optimize(model.train(), x, rules="inference", cost_guard=False)
    (graph,) = [made.graph for made in state_of(model).specializations if not made.training]
    assert any("channels_last" in node.kwargs for node in graph.nodes)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_two_images_do_not_both_change() -> None:
    """One of two concatenated images leaves the result contiguous, and both would not."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Layer(3), Layer(3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.cat((F.relu(self.one(x)), F.relu(self.other(x))), 1)
            return h.view(len(h), -1).sum(-1)

    torch.manual_seed(0)
    model, twin, layers = optimized(Two(), images())
    assert sum("channels_last" in layer.kwargs for layer in layers) == 1
    assert_equal(model, twin, images())


def read_later(model: Classifier, h: Tensor, y: Tensor) -> Tensor:
    return pooled(model, h, y) + pooled(model, y, h)


def view_read_later(model: Classifier, h: Tensor, y: Tensor) -> Tensor:
    return pooled(model, h, y) + h[:, :, 0].sum()


def side_branch(model: Classifier, h: Tensor, y: Tensor) -> Tensor:
    return pooled(model, h, y) * F.relu(model.first(h)).mean()


@pytest.mark.parametrize("head", [read_later, view_read_later, side_branch])
def test_a_residual_that_is_read_later_is_kept(head: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, twin, layers = optimized(Classifier(head), images())
    assert [layer for layer in layers if "residual" in layer.kwargs]
    assert not [layer for layer in layers if "out" in layer.kwargs]
    assert_equal(model, twin, images())


def test_an_input_is_not_overwritten() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layer(x) + x).mean((2, 3))

    torch.manual_seed(0)
    x = torch.randn(2, CHANNELS, 6, 6)
    model, twin, (layer,) = optimized(Residual(), x)
    assert "residual" in layer.kwargs and "out" not in layer.kwargs
    assert_equal(model, twin, x.to(memory_format=torch.channels_last))
