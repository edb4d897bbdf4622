"""Updates and reads of a batch norm's statistics before, amid and behind a match keep their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.rules.batch_norms import Block, Residual, assert_same_step, images, optimized, randomized

Tensor = torch.Tensor


class Twice(Block):
    """One norm for two values, interleaved."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.norm(self.conv(x)), self.norm(self.conv(x) * 3)
        return self.act(a) - self.act(b)


class OneAfterTheOther(Block):
    def forward(self, x: Tensor) -> Tensor:
        a = self.act(self.norm(self.conv(x)))
        return self.act(self.norm(a * 3)) - a


class ReadBetween(Block):
    """The updated mean is read before the activation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        mean = self.norm.running_mean.sum()
        return self.act(h) * mean


class ReadAround(Block):
    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_mean.clone()
        h = self.act(self.norm(self.conv(x)))
        return h * (self.norm.running_mean - before)[:, None, None]


class ChangedBetween(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        self.norm.running_var.mul_(2)
        return self.act(h)


class OnData(Block):
    """A branch on data after the update: the graph may start again."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.conv(x)))
        return h * 2 if h.sum() > 0 else h


class OtherState(Block):
    """A second name for the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm2d(4)
        self.other.running_mean, self.other.running_var = self.norm.running_mean, self.norm.running_var

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.norm(self.conv(x)), self.other(self.conv(x) * 2)
        return self.act(a) + self.act(b)


@pytest.mark.parametrize("make", [Twice, OneAfterTheOther, ReadBetween, ReadAround, ChangedBetween, OnData, OtherState])
@pytest.mark.parametrize("rules", ["default", "all"])
def test_order_of_updates_and_reads(make: Callable[[], nn.Module], rules: str) -> None:
    torch.manual_seed(0)
    model, twin, _ = optimized(randomized(make()), rules)
    for number, training in enumerate((True, True, False, True)):
        model.train(training), twin.train(training)
        with torch.set_grad_enabled(make is not ChangedBetween):  # torch refuses its backward pass
            assert_same_step(model, twin, images() if number % 2 else -images())


class Shortcut(Residual):
    """As in ResNet where the size changes: the other summand comes of layers of their own, called in between."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.first(x)))
        h += self.shortcut(x)
        return self.act(h)


class SharedNorm(Shortcut):
    """The norm of the match is one of those layers too: two updates, in this order."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 3, 1))
        self.shortcut.append(self.norm)


class SharedStatistics(Shortcut):
    """Another norm updates the same buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, momentum=0.5))
        self.shortcut[1]._buffers = self.norm._buffers


class Reading(Shortcut):
    """A frozen norm reads the statistics that the match updates."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(3))
        self.shortcut[0]._buffers = self.norm._buffers

    def train(self, mode: bool = True) -> Reading:
        super().train(mode)
        self.shortcut.eval()
        return self


@pytest.mark.parametrize("rules", ["default", "all"])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Shortcut(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), True),
        (lambda: Shortcut(nn.AvgPool2d(1), nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True))), True),
        (SharedNorm, False),
        (SharedStatistics, False),
        (Reading, False),
    ],
    ids=["norm", "nested", "shared norm", "shared statistics", "reading"],
)
def test_layers_called_amid_a_match(make: Callable[[], nn.Module], expected: bool, rules: str) -> None:
    model, twin, report = optimized(make(), rules)
    found = {entry.rule: entry.status for entry in report.entries if entry.path == ""}
    assert (found.get("batch_norm_relu") == "applied") is expected
    for mode in (True, False, True):
        assert_same_step(model.train(mode), twin.train(mode), images())
