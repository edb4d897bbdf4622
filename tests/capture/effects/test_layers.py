"""Graphs that call only layers of torch: no state is checked behind them, until a layer runs other code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.capture.effects.later_reads import StateCheck
from schedule.capture.effects.layers import is_layer
from schedule.runtime.scheduled import state_of
from schedule.util.errors import ScheduleError

pytestmark = pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")


class Block(nn.Module):
    """Layers, something to rewrite, numbers and a setting of a layer read behind calls, and a branch on data."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, 16), nn.Conv1d(1, 1, 3, padding=1)
        self.dropout, self.last = nn.Dropout(dropout) if dropout else nn.Identity(), nn.Linear(16, 8)
        self.gain, self.limit = 2.0, 100.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.first(x))
        y = F.silu(y) * self.middle(y[:, None])[:, 0] * self.gain
        y = self.last(y) * self.middle.padding[0] + self.gain
        return y * 2 if y.sum() < self.limit * self.gain else y


def made(dropout: float = 0.0) -> tuple[Block, Block, Tensor]:
    """Return a scheduled block that still calls all its layers, its twin, and an input."""
    torch.manual_seed(0)
    block, x = Block(dropout), torch.randn(4, 8)
    twin = copy.deepcopy(block)
    flat = schedule.create_schedule(block, (x,)).trace(flatten=True)
    report = schedule.optimize(flat, rules="gated_mlp", cost_guard=False)
    assert report.applied
    return block, twin, x


@contextmanager
def counted_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """Collect the modules whose state is checked behind a call."""
    checked: list[nn.Module] = []
    check = StateCheck.__call__

    def counting(self: StateCheck, module: nn.Module) -> None:
        checked.append(module)
        check(self, module)

    with monkeypatch.context() as patch:
        patch.setattr(StateCheck, "__call__", counting)
        yield checked


def seeded(call: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(1)
    return call()


def test_state_is_checked_behind_calls_only_while_a_layer_runs_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    block, twin, x = made()
    seen: list[Any] = []
    with counted_checks(monkeypatch) as checked:
        torch.testing.assert_close(block(x), twin(x))
        assert not checked
        handle = block.last.register_forward_hook(lambda *given: seen.append(given))
        torch.testing.assert_close(block(x), twin(x))
        assert checked and len(seen) == 1
        handle.remove()
        checked.clear()
        torch.testing.assert_close(block(-x), twin(-x))
        assert not checked and len(seen) == 1 and state_of(block).fallbacks == 0


class Meddling(nn.Linear):
    """A layer that changes its parent."""

    parents: tuple[nn.Module, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        self.parents[0].gain = 5.0
        return super().forward(input)


def _hook(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    block.last.register_forward_pre_hook(lambda *given: setattr(block, "gain", 5.0))


def _other_layer(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    block.last.__class__ = Meddling
    block.last.parents = (block,)


def _own_forward(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(given: Tensor) -> Tensor:
        block.gain = 5.0
        return F.linear(given, block.last.weight, block.last.bias)

    block.last.forward = forward


def _patched(cls: type[nn.Module], name: str) -> Callable[[Block, pytest.MonkeyPatch], None]:
    original = getattr(cls, name)

    def change(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
        def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            if self in (block.middle, block.last):
                block.gain = 5.0
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, patched)

    return change


def _parametrized(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meddled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            block.gain = 5.0
            return weight

    nn.utils.parametrize.register_parametrization(block.last, "weight", Meddled(), unsafe=True)
    block.gain = 2.0


CHANGES: dict[str, Callable[[Block, pytest.MonkeyPatch], None]] = {
    "a hook": _hook,
    "another class": _other_layer,
    "a forward of its own": _own_forward,
    "a patched forward": _patched(nn.Linear, "forward"),
    "a patched method": _patched(nn.Conv1d, "_conv_forward"),
    "a patched call": _patched(nn.Linear, "_call_impl"),
    "a parametrization": _parametrized,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_changes_what_is_read_behind_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block, twin, x = made()
    torch.testing.assert_close(block(x), twin(x))
    with monkeypatch.context() as patch:
        CHANGES[name](twin, patch)
        expected = twin(x)
    try:
        CHANGES[name](block, monkeypatch)
        ours = block(x)
    except ScheduleError as error:
        assert "gain" in str(error)
    else:
        torch.testing.assert_close(ours, expected)


def test_another_layer_in_place_of_one() -> None:
    block, twin, x = made()
    for each in (block, twin):
        each(x)
        torch.manual_seed(2)
        each.last = nn.Sequential(nn.Linear(16, 8), nn.Tanh())
    torch.testing.assert_close(block(x), twin(x))
    for each in (block, twin):
        each.last = nn.Identity()
        each.gain = 2.0
    torch.testing.assert_close(block(x), twin(x))


def test_a_missing_layer_is_named_by_the_error() -> None:
    block, _, x = made()
    del block.last
    with pytest.raises(AttributeError, match="last"):
        block(x)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_failed_check_repeats_what_was_drawn(replaced: bool) -> None:
    block, twin, x = made(dropout=0.0 if replaced else 0.5)
    for each in (block, twin):
        if replaced:
            each.dropout = nn.Dropout(0.5)
        each.limit = 100.0
        each.last.bias.data.fill_(1e4)  # the other branch
    torch.testing.assert_close(seeded(lambda: block(x)), seeded(lambda: twin(x)))


def test_copies_and_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    block, twin, x = made()
    with counted_checks(monkeypatch) as checked:
        torch.testing.assert_close(copy.deepcopy(block)(x), twin(x))
        assert not checked
    torch.testing.assert_close(torch.compile(block, backend="eager")(x), twin(x))


def test_a_layer_is_a_module_of_torch_as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(is_layer, (nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), nn.Identity(), nn.RReLU(), nn.GELU())))
    others = (
        Meddling(2, 2),
        nn.Sequential(),
        nn.MultiheadAttention(2, 1),
        nn.LSTM(2, 2),
        nn.TransformerEncoderLayer(2, 1),
    )
    assert not any(map(is_layer, others))
    linear = nn.Linear(2, 2)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert not is_layer(linear)
    monkeypatch.undo()
    assert is_layer(linear) and is_layer(nn.Linear(2, 2))
