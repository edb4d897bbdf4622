"""In-place work on memory that the forward made itself is nobody else's business; on any other it is."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import FallbackWarning, install, state_of
from schedule.util.errors import TraceError


class Changing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change, self.linear, self.identity = change, nn.Linear(4, 4), nn.Identity()
        self.norm, self.relu = nn.BatchNorm1d(4, track_running_stats=False), nn.ReLU(inplace=True)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        y = self.change(self, x)
        return y * 2 if y.mean().item() > -100 else y  # a branch that is only known now


def scheduled(change, example):
    module = Changing(change)
    twin = copy.deepcopy(module)
    recording = record(module, example)
    install(module, [specialize(module, Changing.forward, recording.calls[module][0], recording, True)])
    return module, twin


OWN = {
    "of a layer": lambda self, x: self.linear(x).div_(2),
    "what a layer passes on": lambda self, x: self.identity(self.relu(self.norm(x))).add_(1),
    "of a product": lambda self, x: torch.einsum("bi,ij->bj", x, self.linear.weight).add_(1),
    "a view": lambda self, x: (x + 1).view(-1, 2).t().mul_(3),
    "words of Python": lambda self, x: x * ((x > 0) | (x < 1)).logical_and_(x < 5),
    "a cast": lambda self, x: x.double().add_(1),
    "a copy": lambda self, x: x.clone().relu_(),
}
SHARED = {
    "the input": lambda self, x: x.div_(2),
    "a view of the input": lambda self, x: x[:1].add_(1),
    "the input, passed on": lambda self, x: self.identity(x).add_(1),
    "a buffer": lambda self, x: self.state.add_(1) + x,
    "no cast": lambda self, x: x.float().add_(1),
    "what may be the input": lambda self, x: x.t().contiguous().mul_(2),
    "what is the input in evaluation": lambda self, x: nn.functional.dropout(x, 0.0).mul_(2),
}


@pytest.mark.parametrize("change", OWN.values(), ids=OWN)
def test_a_branch_after_a_change_of_own_memory_is_checked(change):
    module, twin = scheduled(change, torch.randn(2, 4))
    for x, missed in ((torch.randn(3, 4), 0), (torch.full((3, 4), float("nan")), 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            ours = module(x.clone())
        torch.testing.assert_close(ours, twin(x.clone()), rtol=0, atol=0, equal_nan=True)
        assert state_of(module).fallbacks == missed


@pytest.mark.parametrize("change", SHARED.values(), ids=SHARED)
def test_a_branch_after_a_change_that_is_seen_outside_is_refused(change):
    with pytest.raises(TraceError, match="may have changed state"):
        scheduled(change, torch.randn(2, 4))


def test_sizes_are_followed_through_changes_in_place():
    class Dividing(nn.Module):
        def forward(self, x):
            x.div_(2)
            return x + 1 if x.shape[0] % 2 == 0 else x

    module = Dividing()
    recording = record(module, torch.randn(2, 4))
    made = specialize(module, Dividing.forward, recording.calls[module][0], recording, True)
    assert made.guards and not made.has_checks
