"""Batch norms in scheduled modules: what they update, and what is left alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import schedule
from schedule.runtime.scheduled import state_of

Tensor = torch.Tensor


class Block(nn.Module):
    """A convolution, a batch norm and an activation."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, **settings)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Residual(nn.Module):
    """As in ResNet, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = Block(), nn.Conv2d(4, 3, 1)
        self.norm, self.act = nn.BatchNorm2d(3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.first(x)))
        h += x
        return self.act(h)


class Functional(nn.Module):
    """A batch norm that keeps its statistics itself, as timm's do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
        return F.silu(F.batch_norm(x, self.mean, self.var, self.weight, self.bias, self.training, 0.2, 1e-4))


def images(samples: int = 4, width: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(samples, 3, width, 5, dtype=dtype)


def randomized(model: nn.Module) -> nn.Module:
    """Statistics and parameters that are not those of a new batch norm."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def optimized(model: nn.Module, rules: object = "all", **options: object) -> tuple[nn.Module, nn.Module, object]:
    """The scheduled model, a twin left as it is, and the report."""
    twin = copy.deepcopy(model)
    report = schedule.optimize(model, images(), rules=rules, cost_guard=False, **options)
    return model, twin, report


def applied(report: object) -> set[str]:
    return {entry.rule for entry in report.entries if entry.status == "applied"}  # type: ignore[attr-defined]


def fallbacks(model: nn.Module) -> int:
    return sum(state_of(each).fallbacks for each in model.modules() if state_of(each) is not None)


def assert_same_step(model: nn.Module, twin: nn.Module, x: Tensor, exact: bool = True) -> None:
    """Results, gradients and buffers, those to the bit unless the parameters differ by rounding already."""
    given = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = model(given[0]), twin(given[1])
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()
    weights = torch.linspace(-1, 1, ours.numel()).view(ours.shape).to(ours.dtype)
    for out in (ours, theirs):
        if out.requires_grad:
            (out * weights).sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-5)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    for (name, mine), other in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other[1], msg=name)
        assert not exact or torch.equal(mine, other[1]), name


@pytest.mark.parametrize("make", [Block, Residual, Functional])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_several_steps_in_both_modes(make: Callable[[], nn.Module], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model, twin, report = optimized(randomized(make()))
    assert {name for name in applied(report) if name.startswith("batch_norm")}
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    for number, training in enumerate((True, True, False, True, False)):
        model.train(training), twin.train(training)
        x = images(3 + number, 4 + number).contiguous(memory_format=layout)
        assert_same_step(model, twin, x, exact=number == 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert_same_step(model, twin, images(2, 7), exact=False)
    assert fallbacks(model) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": None},
        {"momentum": 0.9, "eps": 1e-2},
        {"affine": False},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_settings_of_a_norm(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    model, twin, report = optimized(randomized(Block(**settings)))
    assert "batch_norm_relu" in applied(report)
    for training in (True, True, False, True):
        model.train(training), twin.train(training)
        assert_same_step(model, twin, images())
    assert fallbacks(model) == 0


def frozen(model: Block) -> None:
    model.norm.eval()


def new_momentum(model: Block) -> None:
    model.norm.momentum = 0.7


def no_statistics(model: Block) -> None:
    model.norm.running_mean = model.norm.running_var = model.norm.num_batches_tracked = None


def other_statistics(model: Block) -> None:
    model.norm.running_mean = torch.full((4,), 0.25)


def in_double(model: Block) -> None:
    model.double()


def doubled_by_a_hook(model: Block) -> None:
    model.norm.register_forward_hook(lambda module, args, out: out * 2)


def doubled_weight(model: Block) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    parametrize.register_parametrization(model.norm, "weight", Doubled())


def synchronized(model: Block) -> None:
    model.norm = nn.SyncBatchNorm.convert_sync_batchnorm(model.norm)


def of_another_class(model: Block) -> None:
    class Halved(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    norm = Halved(4)
    norm.load_state_dict(model.norm.state_dict())
    model.norm = norm


CHANGES = [
    frozen,
    new_momentum,
    no_statistics,
    other_statistics,
    in_double,
    doubled_by_a_hook,
    doubled_weight,
    synchronized,
    of_another_class,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rules", ["default", "inference"])
def test_a_change_afterwards(change: Callable[[Block], None], rules: str) -> None:
    torch.manual_seed(0)
    model, twin, _ = optimized(randomized(Block()).train(), rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", schedule.FallbackWarning)
        for each in (model, twin):
            change(each)  # type: ignore[arg-type]
        dtype = next(model.parameters()).dtype
        for _ in range(2):
            assert_same_step(model, twin, images(dtype=dtype))
        model.eval(), twin.eval()
        assert_same_step(model, twin, images(dtype=dtype))


@pytest.mark.parametrize("change", [frozen, doubled_by_a_hook, doubled_weight, synchronized, of_another_class])
def test_a_change_before(change: Callable[[Block], None]) -> None:
    torch.manual_seed(0)
    model = randomized(Block()).train()
    change(model)  # type: ignore[arg-type]
    model, twin, report = optimized(model)
    assert "batch_norm_relu" not in applied(report)
    if change is not doubled_weight:
        assert any("stays a call" in entry.reason for entry in report.entries if entry.rule == "batch_norm_relu")
    for training in (True, False):
        if change is frozen:
            model.train(), twin.train(), model.norm.eval(), twin.norm.eval()
        else:
            model.train(training), twin.train(training)
        assert_same_step(model, twin, images())


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


def test_one_value_for_each_channel_is_an_error_and_updates_nothing() -> None:
    model, twin, _ = optimized(randomized(Block()).train())
    before = copy.deepcopy(model.state_dict())
    for each in (model, twin):
        with pytest.raises(ValueError, match=r"[Ee]xpected more than 1 value per channel"):
            each(torch.randn(1, 3, 1, 1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_undo_and_copies() -> None:
    torch.manual_seed(0)
    model = randomized(Block())
    before = copy.deepcopy(model.state_dict())
    sch = schedule.create_schedule(model, images())
    sch.optimize("all", cost_guard=False)
    assert list(model.state_dict()) == list(before)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        reference = Block()
        reference.load_state_dict(before)
        for training in (True, False):
            twin.train(training), reference.train(training)
            assert_same_step(twin, reference, images())
    while sch.history:
        sch.undo()
    assert type(model) is Block
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("rules", ["default", "all"])
def test_compiled(rules: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, twin, _ = optimized(randomized(Residual()), rules)
    compiled = torch.compile(model, backend="aot_eager")
    for training in (True, False, True):
        model.train(training), twin.train(training)
        with torch.no_grad():
            torch.testing.assert_close(compiled(images()[:2] * 0 + 1), twin(images()[:2] * 0 + 1))
        for (name, mine), other in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, other, msg=name)


@pytest.mark.parametrize("mode", [True, False])
def test_autocast(mode: bool) -> None:
    torch.manual_seed(0)
    model, twin, _ = optimized(randomized(Block()).train(mode))
    x = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = model(x), twin(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2)


def test_folding_follows_every_change_of_a_parameter() -> None:
    """Also those that no version counter sees, as in the averages of many trainers."""
    torch.manual_seed(0)
    model, twin, report = optimized(randomized(Block()).eval(), "inference")
    assert applied(report) == {"conv_batch_norm_relu"}
    for name in ("conv.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"):
        for each in (model, twin):
            each.state_dict()[name].data.mul_(1.5)
        with torch.no_grad():
            assert_same_step(model, twin, images())


def test_padding_that_is_not_zeros_stays() -> None:
    torch.manual_seed(0)
    model = randomized(Block())
    model.conv.padding_mode = "reflect"
    model.conv._reversed_padding_repeated_twice = [1, 1, 1, 1]
    model, twin, report = optimized(model.eval(), "inference")
    assert not applied(report)
    assert_same_step(model, twin, images())


def test_a_replacement_that_loses_the_update_is_refused() -> None:
    model = Block().train()
    sch = schedule.create_schedule(model, images())
    with pytest.raises(schedule.MatchError, match=r"updates norm\.num_batches_tracked"):
        sch.replace(lambda x, *rest: torch.relu(x), sch.find("batch_norm_relu", expect=1))
