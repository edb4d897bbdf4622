"""Functions that compute indices from indices are calls: a graph with them holds for any data."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from schedule.capture.python.index_functions import indices_of
from schedule.capture.recording.recording import record
from schedule.capture.specializing.specialization import specialize
from schedule.runtime.scheduled import install, state_of

pytestmark = [
    pytest.mark.unreplayable("the test installs graphs beside the schedule"),
    pytest.mark.filterwarnings("ignore"),
]


def positions_of(ids):
    """Counts within each run of like tokens; as models find the images in a text."""
    positions = torch.zeros_like(ids)
    for row in range(ids.shape[0]):
        start = 0
        for _, run in itertools.groupby(ids[row].tolist()):
            length = len(list(run))
            positions[row, start : start + length] = torch.arange(length)
            start += length
    return positions


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.last = nn.Embedding(5, 4), nn.Embedding(99, 4), None

    def positions(self, ids):
        return positions_of(ids)

    def forward(self, ids):
        return self.words(ids) + self.places(self.positions(ids))


class OfAFile(Positions):
    def forward(self, ids):
        return self.words(ids) + self.places(positions_of(ids))


class WithRest(Positions):
    """Several results, some of them numbers."""

    def positions(self, ids):
        found = positions_of(ids)
        return found, {"longest": int(found.max()), "none": None}

    def forward(self, ids):
        found, rest = self.positions(ids)
        assert rest["none"] is None
        return self.words(ids) + self.places(found) * rest["longest"]


class Sometimes(Positions):
    """What it gives depends on the data."""

    def positions(self, ids):
        found = positions_of(ids)
        return found, (found.max() if sum(ids.flatten().tolist()) > 20 else None)

    def forward(self, ids):
        found, more = self.positions(ids)
        out = self.words(ids) + self.places(found)
        return out if more is None else out + more


class Keeping(Positions):
    """Leaves what it computes in an attribute, which is used."""

    def positions(self, ids):
        self.last = positions_of(ids)
        return self.last + 1

    def forward(self, ids):
        return self.words(ids) + self.places(self.positions(ids)) + self.places(self.last)


class Counting(Positions):
    """Leaves a number in an attribute."""

    def positions(self, ids):
        found = positions_of(ids)
        self.last = len(set(ids.flatten().tolist())) * ids.shape[1]
        return found

    def forward(self, ids):
        return self.words(ids) + self.places(self.positions(ids)) * self.last


class KeepingOutside(Positions):
    """A function around the function of indices leaves what that one computes in an attribute."""

    def kept(self, ids):
        self.last = self.positions(ids)
        return self.last + 1

    def forward(self, ids):
        return self.words(ids) + self.places(self.kept(ids)) + self.places(self.last)


class Rebinding(Positions):
    """A name that was given to it is something else by the time it looks at data."""

    def positions(self, ids, more=None):
        more = iter([1])
        return positions_of(ids) + next(more)


class SizeOutside(Positions):
    """A size that the function reads first binds the rest."""

    def forward(self, ids):
        found = self.positions(ids)
        return self.words(ids) + self.places(found) if ids.shape[0] > 1 else self.words(ids)


class Filling(Positions):
    """Changes what it is given."""

    def positions(self, ids, lengths):
        lengths.append(len(set(ids[0].tolist())))
        return positions_of(ids)

    def forward(self, ids):
        lengths = []
        return self.words(ids) + self.places(self.positions(ids, lengths)) * lengths[0]


class Writing(Positions):
    """Writes to the tensor that it is given."""

    def positions(self, ids):
        ids[:, 0] = ids[0].tolist()[1]
        return positions_of(ids)

    def forward(self, ids):
        ids = ids.clone()
        found = self.positions(ids)
        return self.words(ids) + self.places(found)


class Drawing(Positions):
    """Draws numbers, which a call that nobody uses would not."""

    def positions(self, ids):
        return positions_of(ids) + torch.randint(3, (1,))

    def forward(self, ids):
        return self.words(ids) + self.places(self.positions(ids))


class Given(Positions):
    """Is given more than indices."""

    def positions(self, ids, x):
        return positions_of(ids) + x.sum().long() * 0

    def forward(self, ids):
        x = self.words(ids)
        return x + self.places(self.positions(ids, x))


def rows(*texts):
    return torch.tensor([[int(c) for c in text] for text in texts])


OTHERS = (rows("1122333", "4444112"), rows("1234012", "2222222", "0011223"), rows("1"), rows("0", "1"))


def traced(cls):
    torch.manual_seed(0)
    module, example = cls().eval(), rows("11222", "33311")
    twin = copy.deepcopy(module)
    recording = record(module, example)
    made = specialize(module, cls.forward, recording.calls[module][0], recording, False)
    install(module, [made], "")
    return module, twin, made


def calls_in(made):
    return [node for node in made.graph.nodes if node.target is indices_of]


@pytest.mark.parametrize("cls", [Positions, OfAFile, WithRest, KeepingOutside, Rebinding])
def test_a_graph_with_a_call_holds_for_any_data(cls):
    module, twin, made = traced(cls)
    assert len(calls_in(made)) == 1
    for ids in OTHERS:
        assert torch.equal(module(ids), twin(ids))
    assert state_of(module).fallbacks == 0
    again = copy.deepcopy(module)
    assert torch.equal(again(OTHERS[0]), twin(OTHERS[0]))


def test_a_size_that_the_function_reads_too_still_binds_the_graph():
    module, twin, made = traced(SizeOutside)
    assert len(calls_in(made)) == 1 and any("ids.shape[0] > 1" in guard for guard in made.guards)
    for ids, misses in zip(OTHERS, (0, 0, 1, 1), strict=True):
        assert torch.equal(module(ids), twin(ids))
        assert state_of(module).fallbacks == misses


def test_a_number_that_is_given_back_is_that_of_the_call():
    module, _, made = traced(WithRest)
    first, second = module(rows("111111111")), module(rows("123"))
    assert not torch.equal(first[:, :3], second) and len(calls_in(made)) == 1


@pytest.mark.parametrize("cls", [Sometimes, Keeping, Counting, Filling, Writing, Drawing, Given])
def test_a_function_that_does_more_is_never_wrong(cls):
    module, twin, _ = traced(cls)
    for ids in (*OTHERS[:2], rows("11222", "33311")):
        found = []
        for each in (module, twin):
            torch.manual_seed(1)
            found.append(each(ids))
        assert torch.equal(*found)
        torch.testing.assert_close(module.last, twin.last)


@pytest.mark.parametrize("cls", [Keeping, Counting, Filling, Writing, Drawing, Given])
def test_such_a_function_is_no_call(cls):
    _, _, made = traced(cls)
    called = [node.args[0] for node in calls_in(made)]
    assert not any(str(function.target).endswith("positions") for function in called)
