"""No submodule is called twice where a branch on data comes out otherwise, whatever else its calls do."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.capture.effects.layers import is_plain
from schedule.runtime.scheduled import MAX_ADAPTATIONS, state_of

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore::UserWarning")


class Child(nn.Module):
    """Does what ``act`` does."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.linear, self.layer = act, nn.Linear(8, 8), nn.LeakyReLU(0.3, inplace=True)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """Call ``act`` without gradients: some change their input."""
        with torch.no_grad():
            return self.act(self, x)


def augmented_buffer(m: Child, x: Tensor) -> Tensor:
    mean = m.mean
    mean += 1.0
    return x + mean


def augmented_input(m: Child, x: Tensor) -> Tensor:
    x += 1.0
    return m.linear(x)


def item_of_a_buffer(m: Child, x: Tensor) -> Tensor:
    mean = m.mean
    mean[0] = mean[0] + 1
    return m.linear(x) + mean


CHILDREN: dict[str, Callable[[], nn.Module]] = {
    name: (lambda act=act: Child(act))
    for name, act in {
        "returns what it changes": lambda m, x: x.mul_(2),
        "counts and changes its input": lambda m, x: (m.mean.add_(1), x.mul_(2), m.linear(x))[2],
        "out": lambda m, x: (torch.add(x.mean(0), m.mean, out=m.mean), m.linear(x))[1],
        "batch norm": lambda m, x: F.batch_norm(x, m.mean, m.spread, training=True),
        "batch norm in training": lambda m, x: F.batch_norm(x, m.mean, m.spread, training=m.training),
        "operator": lambda m, x: operator.iadd(m.mean, 1.0) + m.linear(x),
        "foreach": lambda m, x: (torch._foreach_add_([m.mean], 1.0), m.linear(x))[1],
        "inplace by position": lambda m, x: F.leaky_relu(x, 0.3, True),
        "inplace": lambda m, x: F.leaky_relu(x, 0.3, inplace=True),
        "layer inside": lambda m, x: m.layer(x),
        "by name": lambda m, x: getattr(m.mean, "add_")(1.0) + x,  # noqa: B009 - the name is what hides it
        "operator of torch": lambda m, x: torch.ops.aten.add_(m.mean, 1.0) + x,
        "augmented buffer": augmented_buffer,
        "augmented input": augmented_input,
        "item of a buffer": item_of_a_buffer,
        "random": lambda m, x: x + torch.svd_lowrank(x, q=1)[0],
    }.items()
}
CHILDREN |= {
    "layer": lambda: nn.LeakyReLU(0.3, inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
    "norm": lambda: nn.BatchNorm1d(8),
}


class Parent(nn.Module):
    """Gives its child the input, a computed tensor or the output of a layer, and branches on data after the call."""

    def __init__(self, child: nn.Module, given: str) -> None:
        super().__init__()
        self.child, self.linear, self.given = child, nn.Linear(8, 8), given
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Draw before and after the call as well."""
        x = x + 0 * torch.rand_like(x) if self.given != "input" else x
        y = F.gelu(self.linear(x))
        given = {"input": x, "computed": y * 1, "output": self.first(x)}[self.given]
        z = self.child(given)
        if y[0, 0] > 0:
            y = y * 2
        return y + z + given + torch.rand_like(y)


def called(model: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, Tensor, float]:
    """Return the output, the input after the call, and what is drawn next."""
    torch.manual_seed(seed)
    x = x.clone()
    with torch.no_grad():
        return model(x), x, torch.rand(()).item()


OTHERWISE = pytest.mark.parametrize("most", [0, MAX_ADAPTATIONS], ids=["original forward", "further graph"])
"""What runs if the branch comes out the other way."""


@pytest.mark.one_in(2)
@OTHERWISE
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("given", ["input", "computed", "output"])
@pytest.mark.parametrize("name", CHILDREN)
def test_a_submodule_is_called_once(
    name: str, given: str, training: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedule.runtime.scheduled.MAX_ADAPTATIONS", most)
    torch.manual_seed(0)
    model = Parent(CHILDREN[name](), given)
    twin = copy.deepcopy(model)
    schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    model.train(training), twin.train(training)
    for seed in range(8):
        x = torch.randn(2, 8)
        torch.testing.assert_close(called(model, x, seed), called(twin, x, seed))
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))


@OTHERWISE
def test_the_branch_comes_out_both_ways(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing above is tested."""
    monkeypatch.setattr("schedule.runtime.scheduled.MAX_ADAPTATIONS", most)
    torch.manual_seed(0)
    model = Parent(CHILDREN["norm"](), "output").eval()
    schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    for seed in range(8):
        called(model, torch.randn(2, 8), seed)
    state = state_of(model)
    assert state is not None and len(state.adaptations) == min(most, 1)
    assert 0 < state.fallbacks < 8 if not most else state.fallbacks == 0


def test_a_change_that_the_recorded_run_did_not_make_is_not_made_twice() -> None:
    class Later(nn.Module):
        """Changes its input in training alone."""

        def forward(self, x: Tensor) -> Tensor:
            """Drop in place."""
            return F.dropout(x, 0.5, self.training, inplace=True)

    torch.manual_seed(0)
    model = Parent(Later(), "computed")
    schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    with pytest.raises(schedule.ScheduleError, match="after a tensor that child is given or returns"):
        for seed in range(8):
            called(model, torch.randn(2, 8), seed)


class Reused(nn.Module):
    """Changes the output of a layer in place after it has read it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Branch after that."""
        hidden = self.layer(x)
        before = hidden.sum()
        hidden += 1
        hidden[0].mul_(2)
        y = F.gelu(self.linear(hidden))
        return y + before if y[0, 0] > 0 else y * hidden


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.Identity(), nn.Dropout(0.5), nn.LayerNorm(8)], ids=str)
def test_an_output_changed_in_place_is_changed_once(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = Reused(layer)
    twin = copy.deepcopy(model)
    schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    for seed in range(8):
        x = torch.randn(2, 8)
        torch.testing.assert_close(called(model, x, seed), called(twin, x, seed))


def test_a_layer_of_torch_that_draws_or_counts_is_not_called_again() -> None:
    plain = [nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.GELU(), nn.ReLU(inplace=True), nn.Dropout(), nn.Identity()]
    assert all(map(is_plain, [*plain, nn.BatchNorm1d(2, track_running_stats=False), nn.MaxPool2d(2)]))
    others = [nn.RReLU(), nn.FractionalMaxPool2d(2, output_size=2), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1)]
    hooked, parametrized = nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    assert not any(map(is_plain, [*others, nn.GRU(2, 2), nn.Sequential(nn.ReLU()), hooked, parametrized]))
