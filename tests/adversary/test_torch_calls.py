"""What a torch call of the forward does besides its result: tensors it changes in place, random numbers it draws.

Nothing of it may be lost when the result is unused, and nothing may happen twice where a branch comes out otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from fused.torch_internals.schemas import parameters
from schedule.capture.effects import effects, writes
from schedule.runtime.scheduled import state_of

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore::UserWarning")


class Noise(torch.autograd.Function):
    """Multiplies by random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Draw."""
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Multiply by the same."""
        return grad * ctx.saved_tensors[0]


class Writing(torch.autograd.Function):
    """Changes its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        """Count without a new version of the tensor."""
        count.data.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Double."""
        return grad * 2, None


@torch.library.custom_op("fxschedule_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Add random numbers, which its schema does not say."""
    return x + torch.rand_like(x)


@torch.library.custom_op("fxschedule_tests::counting", mutates_args=("count",))
def counting(x: Tensor, count: Tensor) -> Tensor:
    """Add to ``count``."""
    count.add_(x.mean(0))
    return x * 2


for _op in (noisy, counting):
    _op.register_fake(lambda x, count=None: torch.empty_like(x))


class Net(nn.Module):
    """Calls ``act`` beside what the rules rewrite, and branches on data if asked."""

    def __init__(self, act: Callable[..., Any], branching: bool) -> None:
        super().__init__()
        self.act, self.branching, self.linear = act, branching, nn.Linear(8, 8)
        self.table = nn.Parameter(3 * torch.randn(5, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))
        self.register_buffer("rows", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation; what ``act`` returns is not used."""
        y = F.gelu(self.linear(x))
        with torch.no_grad():
            self.act(self, y.detach())
        if self.branching and y[0, 0] > 0:
            y = y * 2
        return y


CALLS: dict[str, Callable[[Net, Tensor], Any]] = {
    "batch norm": lambda m, y: F.batch_norm(y, m.mean, m.spread, training=True),
    "batch norm by position": lambda m, y: torch.batch_norm(y, None, None, m.mean, m.spread, True, 0.1, 1e-5, False),
    "native batch norm": lambda m, y: torch.ops.aten.native_batch_norm(
        y, None, None, m.mean, m.spread, True, 0.1, 1e-5
    ),
    "instance norm": lambda m, y: F.instance_norm(
        y.expand(4, 8, -1) if y.dim() == 1 else y.t()[None], m.mean, m.spread
    ),
    "foreach": lambda m, y: torch._foreach_add_([m.mean, m.spread], 1.0),
    "foreach of lists": lambda m, y: torch._foreach_add_([m.mean, m.spread], [y.mean(0), y.mean(0)], alpha=0.1),
    "foreach, second argument": lambda m, y: torch._foreach_copy_([m.mean], [m.spread]),
    "out, local first": lambda m, y: torch.add(y.mean(0) * 2, m.mean, out=m.mean),
    "out, several": lambda m, y: torch.max(y, 0, out=(m.mean, torch.empty(8, dtype=torch.long))),
    "in place by position": lambda m, y: F.threshold(m.mean.add_(y.mean(0)), 0.1, 2.0, True),
    "through data": lambda m, y: m.mean.data.add_(y.mean(0)),
    "through detach": lambda m, y: m.mean.detach().add_(y.mean(0)),
    "through a view of a view": lambda m, y: m.mean.view(2, 4)[0].add_(1).mul_(2),
    "through unbind": lambda m, y: m.rows.unbind()[1].add_(y.mean(0)),
    "setting data": lambda m, y: setattr(m.mean, "data", y[0].clone()),
    "a function of torch that sets data": lambda m, y: nn.utils.vector_to_parameters(y[0], [m.mean]),
    "set_": lambda m, y: m.mean.set_(y[0].clone()),
    "renormalizing embedding": lambda m, y: F.embedding(torch.zeros(3, dtype=torch.long), m.table, max_norm=1.0),
    "operator of torch": lambda m, y: torch.ops.aten.add_.Tensor(m.mean, y.mean(0)),
    "operator of torch with out": lambda m, y: torch.ops.aten.add.out(m.mean, y.mean(0), out=m.spread),
    "custom operator": lambda m, y: counting(y, m.mean),
    "autograd function": lambda m, y: Writing.apply(y, m.mean),
    "random, by name": lambda m, y: torch.rand_like(y),
    "random, not by name": lambda m, y: torch.svd_lowrank(y, q=1),
    "random operator of torch": lambda m, y: torch.ops.aten.bernoulli.p(y, 0.5),
    "dropout by position": lambda m, y: torch.dropout(y, 0.5, True),
    "random custom operator": lambda m, y: noisy(y),
    "random autograd function": lambda m, y: Noise.apply(y),
    "random in place": lambda m, y: m.mean.bernoulli_(0.5),
}


def one_call(model: nn.Module, x: Tensor, seed: int) -> tuple[Tensor, float]:
    """Return the output, and what is drawn next."""
    torch.manual_seed(seed)
    return model(x), torch.rand(()).item()


@pytest.mark.parametrize("branching", [False, True], ids=["straight", "branching"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_does_the_same(name: str, branching: bool) -> None:
    torch.manual_seed(0)
    model = Net(CALLS[name], branching)
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    for key, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), f"optimize changes {key}"
    for seed in range(6):
        x = torch.randn(2, 8)
        (ours, our_next), (theirs, their_next) = one_call(model, x, seed), one_call(twin, x, seed)
        torch.testing.assert_close(ours, theirs)
        assert our_next == their_next
        for key, value in twin.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value, msg=lambda text, key=key: f"{key}: {text}")
    state = state_of(model)
    assert branching or name in REFUSED or (state is not None and not state.fallbacks), str(report)


REFUSED = ("setting data", "a function of torch that sets data", "autograd function", "native batch norm")


def test_an_undeclared_write_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(node: Any) -> Any:
        return () if node.target is torch._foreach_add_ else effects.changed(node)

    monkeypatch.setattr(writes, "changed", forgetful)
    model = Net(CALLS["foreach"], False)
    report = schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    assert state_of(model) is None
    assert "_foreach_add_ changes what it is given in place (a tensor of shape (8,))" in str(report.to_json())
    assert "test_torch_calls.py" in str(report.to_json())


def test_the_comparison_at_other_shapes_sees_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that drops a write is found by running it, whatever the analysis of effects says."""
    blind = effects.changed

    def changed(node: Any) -> Any:
        return () if node.target is torch._foreach_add_ else blind(node)

    monkeypatch.setattr(effects, "changed", changed)
    monkeypatch.setattr(writes, "written_tensors", lambda *_: [])
    monkeypatch.setattr("schedule.capture.tracing.tracer.written_tensors", lambda *_: [])
    model = Net(CALLS["foreach"], False)
    report = schedule.optimize(model, (torch.randn(2, 8),), cost_guard=False)
    assert state_of(model) is None
    assert "wrong at other shapes" in str(report.to_json())


def test_written_parameters_come_from_the_schema() -> None:
    written = {each.name for each in parameters(torch.ops.aten.add_.Tensor) if each.is_written}
    assert written == {"self"}
    assert {each.name for each in parameters(torch.ops.aten.add) if each.is_written} == {"out"}
    assert parameters(torch.add) == ()
