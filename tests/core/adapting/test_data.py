"""Forwards that loop over rows or branch on data get a graph for each number and outcome, as many as are worth it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import schedule
from schedule.runtime.scheduled import MAX_ADAPTATIONS, FallbackWarning
from tests.core.adapting.counting import adaptations, fallbacks
from tests.small import Mlp

Batch = tuple[torch.Tensor, ...]


class Rows(Mlp):
    """Computes row by row."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.fc10(self.act(self.fc1(hidden[row]))) for row in range(hidden.shape[0])])


class Pieces(Mlp):
    """Computes piece by piece, of sizes that data gives."""

    def forward(self, hidden: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.fc10(self.act(self.fc1(piece))) for piece in hidden.split(sizes.tolist())])


class Counted(Mlp):
    """Takes as many steps as data says, a number that only the graph computes."""

    def forward(self, hidden: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        for _ in range(torch.repeat_interleave(sizes).shape[0]):
            hidden = super().forward(hidden)
        return hidden


class Branching(Mlp):
    """Branches twice on data, after a layer."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().forward(hidden)
        if hidden.sum() > 0:
            return found + 1
        return found - 1 if hidden.max() > 0 else found * 2


class Dropping(Mlp):
    """Branches on data after a dropout, which draws the same numbers when it is called again."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().forward(self.drop(hidden))
        return found + 1 if hidden.sum() > 0 else found * 2


class Picked(Mlp):
    """Computes the rows that data pick again, by layers that fused ops replace for matrices only, and branches."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.act(self.fc1(hidden))
        for row in (hidden[:, 0] > 0).nonzero()[:, 0].tolist():
            found = found + self.act(self.fc1(hidden[row]))
        return self.fc10(found) if hidden.sum() > 0 else self.fc10(found) * 2


class Normed(Mlp):
    """Branches on data after statistics are updated."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().forward(self.norm(hidden))
        return found + 1 if hidden.sum() > 0 else found * 2


def hidden(rows: int, *middle: int) -> torch.Tensor:
    return torch.linspace(-2, 2.5, 8 * rows * max(1, *middle, 1)).reshape(rows, *middle, 8)


def sizes(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def same_calls(model: nn.Module, batch: Batch, others: list[Batch]) -> None:
    """Schedule ``model`` with ``batch``; outputs and gradients of all calls equal those of a twin, in both modes."""
    twin = copy.deepcopy(model)
    assert schedule.optimize(model, batch, cost_guard=False).applied
    for training in (True, False):
        for each in (batch, *others, *others):
            results = []
            for one in (model.train(training), twin.train(training)):
                one.zero_grad()
                torch.manual_seed(0)
                out = one(*each)
                out.square().sum().backward()
                results.append([out.detach(), *(p.grad for p in one.parameters()), *one.buffers()])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("cls", "batch", "others", "graphs"),
    [
        (Rows, (hidden(2, 3),), [(hidden(3, 3),), (hidden(1, 4),)], 2),
        (Pieces, (hidden(6), sizes(2, 4)), [(hidden(6), sizes(1, 2, 3)), (hidden(7), sizes(4, 3))], 1),
        (Counted, (hidden(6), sizes(1, 1)), [(hidden(5), sizes(2, 1)), (hidden(4), sizes(2))], 1),
        (Branching, (hidden(2),), [(-hidden(3),), (-hidden(2).abs(),), (-hidden(3),)], 2),
        (Dropping, (hidden(2),), [(-hidden(3),)], 1),
    ],
    ids=["rows", "pieces", "counted", "branching", "dropping"],
)  # fmt: skip
def test_each_number_and_outcome_has_a_graph(cls: type[Mlp], batch: Batch, others: list[Batch], graphs: int) -> None:
    torch.manual_seed(0)
    model = cls(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        same_calls(model, batch, others)
    assert adaptations(model) == graphs and fallbacks(model) == 0


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
@pytest.mark.parametrize("most", [0, MAX_ADAPTATIONS], ids=["original forward", "further graph"])
def test_a_call_with_an_effect_is_not_made_twice(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs instead has the result of the first call."""
    monkeypatch.setattr("schedule.runtime.scheduled.MAX_ADAPTATIONS", most)
    torch.manual_seed(0)
    model = Normed(8)
    same_calls(model, (hidden(2),), [(-hidden(2),)])
    assert (fallbacks(model) > 0) == (most == 0)


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_layers_that_fused_ops_compute_in_part_are_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original forward does not take the outputs of their other calls."""
    monkeypatch.setattr("schedule.runtime.scheduled.MAX_ADAPTATIONS", 0)
    torch.manual_seed(0)
    model = Picked(8)
    same_calls(model, (hidden(2),), [(-hidden(2),)])
    assert fallbacks(model) > 0


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_as_many_numbers_as_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedule.runtime.scheduled.MAX_ADAPTATIONS", 2)
    torch.manual_seed(0)
    model = Counted(8)
    twin = copy.deepcopy(model)
    schedule.optimize(model, (hidden(2), sizes(1)), cost_guard=False)
    for count in (1, 2, 3, 4, 5, 2, 1):
        torch.testing.assert_close(model(hidden(2), sizes(count)), twin(hidden(2), sizes(count)))
    assert adaptations(model) == 2 and fallbacks(model) == 2


class Telling(Branching):
    """Prints, at each call."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        print("called")
        return super().forward(hidden)


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_a_message_is_not_written_twice(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Telling(8)
    schedule.optimize(model, (hidden(2),), cost_guard=False)
    capsys.readouterr()
    model(-hidden(2))
    assert "".join(capsys.readouterr()).count("called") <= 2, "once by the graph that fails, once by the forward"


class Unasked(Mlp):
    """Asks in training only whether all values are finite."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().forward(hidden)
        return found * 0 if self.training and not torch.isfinite(hidden).all() else found


@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning")
def test_what_tracing_again_does_not_help_is_tried_once() -> None:
    """The call is recorded in eval mode, which does not ask."""
    torch.manual_seed(0)
    model = Unasked(8).train()
    schedule.optimize(model, (hidden(2),), cost_guard=False)
    for _ in range(3):
        assert model(hidden(2) / 0).isnan().all()
    assert fallbacks(model) == 3 and adaptations(model) == 1
