"""A size that only a message names binds no graph to it; one that a text decides with does."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from schedule.runtime.scheduled import state_of
from tests.capture.running import assert_same, schedule_all

log = logging.getLogger(__name__)


class Checking(nn.Module):
    """Compares a number that data decides with a size, as multimodal models do."""

    def forward(self, x, mask):
        picked = x[mask]
        torch._check(picked.shape[0] <= x.numel(), lambda: "too many")
        message = f"{picked.shape[0]} of {x.shape[0]} {x.shape[1]!s}"
        if picked.shape[0] == 0:
            raise ValueError(message)
        log.debug(message)
        return picked.sum() + x.shape[1]


class Naming(nn.Module):
    """Finds a table by a name that has a size in it."""

    def __init__(self):
        super().__init__()
        self.table_2, self.table_3 = 5.0, 7.0

    def forward(self, x):
        return x * getattr(self, f"table_{x.shape[0]}")


class Keeping(nn.Module):
    """Keeps a text with a size in it."""

    def forward(self, x):
        self.last = f"{x.shape[0]} rows"
        return x * 2


def rows(count):
    return torch.randn(count, 3)


@pytest.mark.filterwarnings("ignore::schedule.runtime.FallbackWarning")  # a failed check is raised by the original
@pytest.mark.parametrize("training", [True, False])
def test_messages_leave_sizes_open(training):
    module = Checking()
    twin = copy.deepcopy(module)
    schedule_all(module, (rows(2), rows(2) > -9))
    module.train(training)
    for x, mask in ((rows(2), rows(2) > -9), (rows(5), rows(5) > 0), (torch.randn(3, 8), torch.randn(3, 8) > 0)):
        assert_same(module(x, mask), twin(x, mask))
    assert state_of(module).fallbacks == 0
    with pytest.raises(ValueError, match="0 of 2 3"):
        module(rows(2), torch.zeros(2, 3, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore::schedule.runtime.FallbackWarning")
def test_a_size_in_a_name_is_guarded():
    module = Naming()
    twin = copy.deepcopy(module)
    schedule_all(module, rows(2))
    for count in (2, 3):
        x = rows(count)
        assert_same(module(x), twin(x))
    assert state_of(module).fallbacks == 1


@pytest.mark.filterwarnings("ignore::schedule.runtime.FallbackWarning")
def test_a_size_in_a_text_that_is_kept_is_guarded():
    module = Keeping()
    schedule_all(module, rows(2))
    for count in (2, 3):
        module(rows(count))
        assert module.last == f"{count} rows"
    assert state_of(module).fallbacks == 1


def test_a_graph_holds_for_as_many_rounds():
    class Chunks(nn.Module):
        def forward(self, x):
            starts = range(0, x.shape[0], 4)
            assert isinstance(starts, range)
            return sum(x[start : min(start + 4, x.shape[0])].sum(0) for start in starts) + len(range(3))

    module = Chunks()
    twin = copy.deepcopy(module)
    schedule_all(module, rows(3))
    for count in (3, 2, 1):
        x = rows(count)
        assert_same(module(x), twin(x))
    assert state_of(module).fallbacks == 0


class Choosing(nn.Module):
    """Finds its layer by a name that data decides, as a mixture of experts may."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"layer_0": nn.Linear(3, 3), "layer_1": nn.Linear(3, 3)})

    def forward(self, x, number):
        log.debug("%s", f"{x.detach()} through {number}")
        return self.layers[f"layer_{number}"](x)


@pytest.mark.filterwarnings("ignore::schedule.runtime.FallbackWarning")
def test_a_number_of_a_tensor_in_a_name_is_guarded():
    module = Choosing()
    twin = copy.deepcopy(module)
    schedule_all(module, (rows(2), torch.tensor(1)))
    for number in (1, 0, 1):
        x = rows(4)
        assert_same(module(x, torch.tensor(number)), twin(x, torch.tensor(number)))
    assert state_of(module).fallbacks == 1
