"""Branches and shapes that data decides: as in the recorded run, checked while the graph runs."""

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


def scheduled(module, *example, training=(True, False)):
    twin = copy.deepcopy(module)
    recording = record(module, example)
    call = recording.calls[module][0]
    made = [specialize(module, type(module).forward, call, recording, mode) for mode in training]
    install(module, made)
    return twin


def assert_as(twin, module, *inputs, missed):
    """The same result, from the graph or (``missed``) from the original forward."""
    before = state_of(module).fallbacks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        ours = module(*inputs)
    assert state_of(module).fallbacks - before == missed
    torch.testing.assert_close(ours, twin(*inputs), rtol=0, atol=0)


class Branching(nn.Module):
    def forward(self, x, mask):
        if mask.all():
            return x * 2
        return x * mask


def test_a_branch_on_data_is_checked_in_the_graph():
    module = Branching()
    x, full, part = torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.eye(2, 3, dtype=torch.bool)
    twin = scheduled(module, x, full)
    assert_as(twin, module, x, full, missed=0)
    assert_as(twin, module, torch.randn(4, 5), torch.ones(4, 5, dtype=torch.bool), missed=0)
    assert_as(twin, module, x, part, missed=1)


class Reading(nn.Module):
    def forward(self, x, length):
        n = length.item()
        return x[:n] * n + torch.arange(n, dtype=x.dtype)[:, None]


def test_a_number_that_no_branch_needs_is_open():
    module = Reading()
    twin = scheduled(module, torch.randn(5, 3), torch.tensor(2))
    for rows, length in ((5, 2), (5, 3), (7, 6)):
        assert_as(twin, module, torch.randn(rows, 3), torch.tensor(length), missed=0)


class Listing(nn.Module):
    def forward(self, x, sizes):
        return torch.cat([part.flip(0) for part in x.split(sizes.tolist())])


def test_a_list_of_numbers_is_open_but_for_its_length():
    module = Listing()
    twin = scheduled(module, torch.randn(5, 3), torch.tensor([2, 3]))
    assert_as(twin, module, torch.randn(7, 3), torch.tensor([6, 1]), missed=0)
    assert_as(twin, module, torch.randn(7, 3), torch.tensor([3, 1, 3]), missed=1)


class Slicing(nn.Module):
    def forward(self, x, sizes):
        return [row[:size] * size for row, size in zip(x, sizes, strict=True)]


def test_a_slice_up_to_a_tensor_is_open():
    module = Slicing()
    twin = scheduled(module, torch.randn(2, 5), torch.tensor([2, 3]))
    assert_as(twin, module, torch.randn(2, 7), torch.tensor([6, 1]), missed=0)


class Masking(nn.Module):
    def forward(self, x, mask):
        picked = x[mask]
        return picked * picked.shape[0]


def test_a_shape_that_data_decides_is_open():
    module = Masking()
    twin = scheduled(module, torch.randn(2, 3), torch.tensor([True, False]))
    assert_as(twin, module, torch.randn(4, 3), torch.tensor([True, False, True, True]), missed=0)


class Looping(nn.Module):
    def forward(self, x, counts):
        for step in range(counts[0]):
            x = x + step + int(counts[1])
        return x


def test_loops_over_data_hold_for_the_numbers_seen():
    module, x = Looping(), torch.randn(2, 3)
    twin = scheduled(module, x, torch.tensor([3, 1]))
    assert_as(twin, module, x, torch.tensor([3, 1]), missed=0)
    assert_as(twin, module, x, torch.tensor([2, 1]), missed=1)
    assert_as(twin, module, x, torch.tensor([3, 2]), missed=1)


class LayerDropping(nn.Module):
    def forward(self, x):
        if self.training and torch.rand([]) < 0.5:
            return x
        return x * 2


def test_a_branch_on_a_random_draw_is_refused():
    with pytest.raises(TraceError, match="data of a tensor"):
        scheduled(LayerDropping(), torch.randn(2, 3))


class Clamping(nn.Module):
    """Asks in training, which no recorded run came to."""

    def __init__(self, overflows):
        super().__init__()
        self.overflows = overflows

    def forward(self, x):
        x = x * 2
        return x.clamp(-5, 5) if self.training and self.overflows(x) else x


@pytest.mark.parametrize(
    "overflows",
    [
        lambda x: not torch.isfinite(x).all(),
        lambda x: torch.isinf(x).any() or x.isnan().any(),
        lambda x: ~x.isfinite().all(),
        lambda x: torch.logical_not(x.isfinite()).any(),
    ],
)
def test_overflows_that_only_training_asks_for_are_expected_not_to_be(overflows):
    module = Clamping(overflows)
    twin = scheduled(module, torch.randn(2, 3)).train()
    module.train()
    assert_as(twin, module, torch.randn(4, 3), missed=0)
    assert_as(twin, module, torch.tensor([[1.0, torch.inf, 2.0]]), missed=1)


class DroppingNever(nn.Module):
    share = 0.0

    def forward(self, x):
        for _ in range(2):
            draw = torch.rand([])
            if self.training and draw < self.share:
                continue
            x = x * 2
        return torch.dropout(x, 0.5, self.training)


def test_a_branch_that_no_draw_takes_is_none_and_the_numbers_are_drawn():
    module, x = DroppingNever(), torch.randn(2, 3)
    twin = scheduled(module, x)
    for training in (True, False):
        outs = []
        for each in (module, twin):
            torch.manual_seed(0)
            outs.append(each.train(training)(x))
        torch.testing.assert_close(*outs, rtol=0, atol=0)
    assert state_of(module).fallbacks == 0
    module.share = 0.5
    with pytest.warns(FallbackWarning):
        module.train()(x)


class DroppingThenBranching(nn.Module):
    """Draws numbers and counts a batch before it knows which way to go."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x, mask):
        x = self.dropout(self.norm(x)) + nn.functional.dropout(x, 0.5, self.training)
        return x * 2 if mask.all() else x


@pytest.mark.parametrize("training", [True, False])
def test_what_was_drawn_and_counted_before_a_miss_is_undone(training):
    module = DroppingThenBranching()
    twin = scheduled(module, torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)).train(training)
    module.train(training)
    x = torch.randn(4, 3)
    for mask, missed in ((torch.ones(4, 3), 0), (torch.eye(4, 3), 1), (torch.ones(4, 3), 0)):
        before = state_of(module).fallbacks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            torch.manual_seed(0)
            ours = module(x, mask.bool()), torch.rand(3)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, (twin(x, mask.bool()), torch.rand(3)), rtol=0, atol=0)
        torch.testing.assert_close(dict(module.named_buffers()), dict(twin.named_buffers()), rtol=0, atol=0)
        assert state_of(module).fallbacks - before == missed


class BranchingAfterAnEffect(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x if self.calls.item() > 3 else x * 2


def test_a_branch_on_what_the_forward_changed_is_refused():
    with pytest.raises(TraceError, match="may have changed state"):
        scheduled(BranchingAfterAnEffect(), torch.randn(2, 3))


class TensorsAsSizes(nn.Module):
    def forward(self, x, sizes):
        rows, columns = sizes
        return x.view(rows, columns) + torch.arange(columns)


def test_sizes_given_as_tensors_are_open():
    module = TensorsAsSizes()
    twin = scheduled(module, torch.randn(6), torch.tensor([2, 3]))
    assert_as(twin, module, torch.randn(20), torch.tensor([4, 5]), missed=0)


class Collecting(nn.Module):
    def forward(self, x, kinds):
        factors = {0: 2.0, 1: 3.0}
        kept = [x[i].sum() * factors[kind] for i, kind in enumerate(kinds.tolist())]
        return torch.tensor([[each, 1] for each in kept], dtype=torch.float64)


def test_numbers_of_data_are_keys_and_tensors_are_made_into_one():
    module = Collecting()
    twin = scheduled(module, torch.randn(2, 3), torch.tensor([0, 1]))
    assert_as(twin, module, torch.randn(2, 5), torch.tensor([0, 1]), missed=0)
    assert_as(twin, module, torch.randn(2, 3), torch.tensor([1, 1]), missed=1)


class NormalizingThenBranching(nn.Module):
    def forward(self, x, mask):
        y = torch.cat(tensors=[nn.functional.normalize(x), x])
        return y * 2 if mask.all() and y.shape[0] > 3 else y


def test_normalizing_draws_no_random_numbers():
    module = NormalizingThenBranching()
    twin = scheduled(module, torch.randn(2, 3), torch.ones(2, 3))
    assert_as(twin, module, torch.randn(2, 5), torch.ones(2, 5), missed=0)
    assert_as(twin, module, torch.randn(1, 5), torch.ones(1, 5), missed=1)


class Experts(nn.Module):
    """As a loop over the experts that some token goes to; the number of an expert is a tensor."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        mask = torch.nn.functional.one_hot(chosen, 3).T
        for expert in mask.sum(1).nonzero():
            expert = expert[0]
            (rows,) = torch.where(mask[expert])
            out.index_add_(0, rows, x[rows] @ self.weights[expert])
        return out


def test_an_index_that_is_a_tensor_without_dimensions():
    module = Experts()
    twin = scheduled(module, torch.randn(5, 4), torch.tensor([0, 2, 2, 1, 0]))
    assert_as(twin, module, torch.randn(7, 4), torch.tensor([2, 2, 1, 0, 1, 1, 1]), missed=0)
    assert_as(twin, module, torch.randn(3, 4), torch.tensor([2, 2, 1]), missed=1)


class Pieces(nn.Module):
    """Sizes that are computed from a tensor, as those of images are."""

    def forward(self, x, sizes):
        pieces = x.split([h * w for h, w in sizes])
        return torch.stack([piece.sum(0) * piece.shape[0] for piece in pieces])


def test_pieces_of_sizes_that_are_tensors():
    module = Pieces()
    twin = scheduled(module, torch.randn(10, 3), torch.tensor([[2, 2], [3, 2]]))
    assert_as(twin, module, torch.randn(10, 3), torch.tensor([[2, 2], [3, 2]]), missed=0)
    assert_as(twin, module, torch.randn(9, 3), torch.tensor([[1, 5], [2, 2]]), missed=0)
