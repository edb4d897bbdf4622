"""What forwards write into the dicts of stateful objects, and branches on objects that change meanwhile."""

from __future__ import annotations

import torch
from torch import nn

from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import install, state_of


class Box:
    """A stateful object with a dict, as EncoderDecoderCache has one."""

    def __init__(self) -> None:
        self.done: dict[int, bool] = {}
        self.kept: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.kept)

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        self.kept.append(value)
        return value


class Caching(nn.Module):
    """Computes once and says so in the object's dict."""

    def forward(self, x: torch.Tensor, box: Box) -> torch.Tensor:
        if box.done.get(0):
            return x * 0
        y = box.keep(x + 1)
        box.done[0] = True
        return y


class Holder(nn.Module):
    """Makes the object itself, changes it, and branches on it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.add_(1)
        if self.layers[0].weight.dtype is torch.float32:
            y = y * 2
        return y


def scheduled(module: nn.Module, *inputs: object) -> nn.Module:
    """``module`` running its graphs."""
    recording = record(module, inputs)
    made = [
        specialize(module, type(module).forward, call, recording, training)
        for call in recording.calls[module]
        for training in (True, False)
    ]
    install(module, made)
    return module


def test_items_written_into_a_dict_of_an_object_are_written_again() -> None:
    module, box = scheduled(Caching(), torch.ones(2, 3), Box()), Box()
    assert torch.equal(module(torch.ones(4, 3), box), torch.full((4, 3), 2.0))
    assert box.done == {0: True} and len(box.kept) == 1


def test_a_call_that_finds_another_dict_runs_the_original_forward() -> None:
    module, box = scheduled(Caching(), torch.ones(2, 3), Box()), Box()
    module(torch.ones(2, 3), box)
    assert torch.equal(module(torch.ones(2, 3), box), torch.zeros(2, 3))
    state = state_of(module)
    assert state is not None and state.fallbacks == 1


def test_a_branch_after_changing_what_was_made_inside_is_allowed() -> None:
    module, x = scheduled(Holder(), torch.ones(2, 4)), torch.randn(3, 4)
    assert torch.equal(module(x), Holder()(x))
    state = state_of(module)
    assert state is not None and state.fallbacks == 0
