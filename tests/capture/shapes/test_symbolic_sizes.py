"""Sizes are followed back to the inputs, so that a branch on one is decided before the graph runs."""

from __future__ import annotations

import copy
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import schedule
from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import FallbackWarning, install, state_of


class Sized(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask):
        self.calls.add_(1)  # from here on nothing can be checked any more
        y = self.result(x, mask)
        return y * 2 if y.shape[1] % 2 == 0 else y + 1


FOLLOWED = {
    "broadcast with what is not known": lambda x, mask: x[:, -mask.shape[1] :] * mask,
    "indexed": lambda x, mask: x[None, 0, :, None].expand(2, -1, 3),
    "indexed from behind": lambda x, mask: x[..., None].transpose(0, 2)[0, ...].transpose(0, 1),
    "broadcast with an indexed one": lambda x, mask: (x[:, -mask.shape[1] :, None] * mask[:, :, None])[..., 0],
    "split by numbers": lambda x, mask: torch.split(x, [2, x.shape[1] - 2], dim=1)[1],
    "split and inferred": lambda x, mask: x.split([2, x.shape[1] - 2], dim=1)[0].reshape(x.shape[0], -1, 1),
    "taken apart": lambda x, mask: x[..., None].expand(-1, -1, 6).unflatten(-1, (3, 2)).unbind(-1)[1],
    "its first dimension taken apart": lambda x, mask: x.unflatten(0, (-1, 3)).unbind()[0],
    "normalized": lambda x, mask: x * torch.rsqrt((x * x).sum(dim=0, keepdim=True) + 1) / x.mean(0),
    "a number from a broadcast": lambda x, mask: mask[:, :1, None] * x[:, None].expand(-1, 4, -1),
    "dimensions by name": lambda x, mask: (
        (x.unsqueeze(dim=1) + 1).transpose(dim0=1, dim1=2).permute(dims=(0, 1, 2))[..., 0]
    ),
    "a product by name": lambda x, mask: x.T.matmul(other=x).matmul(other=x[0]).unsqueeze(0),
    "changed in place": lambda x, mask: x.clone().mul_(3),
}


@pytest.mark.parametrize("result", FOLLOWED.values(), ids=FOLLOWED)
def test_a_branch_on_a_size_after_an_effect(result):
    module = Sized(result)
    twin = copy.deepcopy(module)
    recording = record(module, (torch.randn(3, 6), torch.ones(3, 4)))
    call = recording.calls[module][0]
    install(module, [specialize(module, Sized.forward, call, recording, True)])
    for columns, width in ((6, 4), (8, 6), (7, 3), (5, 1), (9, 2), (2, 2), (2, 1)):
        x, mask = torch.randn(3, columns), torch.ones(3, width)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            ours = module(x, mask)
        torch.testing.assert_close(ours, twin(x, mask), rtol=0, atol=0)
        assert torch.equal(module.calls, twin.calls)
    assert state_of(module).fallbacks < 7


class Convolving(nn.Module):
    """Drops what it padded, as layers of linear attention do; twice as many channels as it is given."""

    def __init__(self, padding, part):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1, 3))
        self.layer, self.part = nn.Conv1d(2, 2, 3, padding=padding), part
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        length = x.shape[1]
        by_layer = self.part(
            self.layer(self.part(nn.functional.conv1d(x[:, None], self.weight, padding=2), length)), length
        )
        return by_layer * 2 if by_layer.shape[2] % 2 == 0 else by_layer + 1


PARTS = {
    "the first": lambda x, length: x[:, :, :length],
    "the last": lambda x, length: x.transpose(1, 2)[:, -length:].transpose(1, 2),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_as_long_as_the_input_is_followed_through_a_padded_convolution(part):
    module = Convolving(2, part)
    twin = copy.deepcopy(module)
    recording = record(module, torch.randn(3, 6))
    made = specialize(module, Convolving.forward, recording.calls[module][0], recording, True)
    install(module, [made])
    for rows, length in ((3, 6), (2, 8), (1, 4)):
        x = torch.randn(rows, length)
        torch.testing.assert_close(module(x), twin(x), rtol=0, atol=0)
    assert state_of(module).fallbacks == 0 and torch.equal(module.calls, twin.calls)
    assert made.guards and not made.has_checks
    assert any("> 0" in guard for guard in made.guards) is (part is PARTS["the last"])  # the last 0 are all


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_that_may_be_shorter_is_not_taken_to_be_as_long(part):
    module = Convolving(0, part)
    twin = copy.deepcopy(module)
    recording = record(module, torch.randn(3, 6))
    install(module, [specialize(module, Convolving.forward, recording.calls[module][0], recording, True)])
    for length in (6, 7, 8, 9):
        x = torch.randn(3, length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            torch.testing.assert_close(module(x), twin(x), rtol=0, atol=0)
    assert torch.equal(module.calls, twin.calls)


class Counting(nn.Module):
    def forward(self, x):
        rows = len(x)
        return x.view(rows, -1) * torch.arange(rows)[:, None] + len([1, 2]) + len(x.shape)


def test_the_length_of_a_tensor_is_open():
    module = Counting()
    recording = record(module, torch.randn(3, 2, 2))
    made = specialize(module, Counting.forward, recording.calls[module][0], recording, False)
    assert not made.guards and not made.has_checks
    x = torch.randn(5, 2, 2)
    torch.testing.assert_close(made.function(module, x), module(x))
    assert "len" not in globals()


class Normalized(nn.Module):
    """Scales by a function of numpy of its sizes, as Cosmos does."""

    def forward(self, x):
        return torch.add(x, x, alpha=np.sqrt(x.shape[0] / x.numel())) * np.log2(x.shape[1])


def test_a_function_of_numpy_of_a_size_is_computed_at_each_call():
    module, twin = Normalized(), Normalized()
    sch = schedule.create_schedule(module, (torch.randn(4, 2),)).trace()
    assert {"sqrt", "log2"} <= {node.name for node in sch.graph.nodes}
    install(module, sch.specializations)
    for shape in ((4, 2), (3, 5)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), twin(x), rtol=0, atol=0)
    assert state_of(module).fallbacks == 0


class Placed(nn.Module):
    """Asks its parameters for their device, as diffusers does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @property
    def device(self):
        try:
            return next(itertools.chain(self.parameters(), self.buffers())).device
        except StopIteration:
            return torch.device("cpu")

    def forward(self, x):
        return self.linear(x.to(self.device))


def test_metadata_of_a_tensor_may_be_asked_for_in_a_block_that_handles_exceptions():
    module = Placed()
    sch = schedule.create_schedule(module, (torch.randn(2, 4),)).trace()
    install(module, sch.specializations)
    module(torch.randn(3, 4))
    assert state_of(module).fallbacks == 0
