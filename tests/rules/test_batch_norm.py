"""Batch norms in scheduled modules: what they update, and what is left alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import schedule
from tests.rules.batch_norms import (
    Block,
    Functional,
    Residual,
    applied,
    assert_same_step,
    fallbacks,
    images,
    optimized,
    randomized,
)

Tensor = torch.Tensor


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
