"""Tensors that rounding alone moves by more than any tolerance: two right programs agree on none of their digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from schedule.verify import equivalence, equivalent
from schedule.verify.compare import TRAINED
from schedule.verify.equivalence import TELL_NOTHING, check_case
from schedule.verify.equivalence_report import Deviation, EquivalenceReport
from schedule.verify.observe import Case, observe
from schedule.verify.tolerances import tolerance_for


class Cancelling(nn.Module):
    """Gives what is left where two equal sums cancel, brought to size one; and something well conditioned."""

    def __init__(self, backwards: bool, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(257))
        self.backwards, self.factor = backwards, factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        terms = x * self.weight
        ordered = terms.flip(-1) if self.backwards else terms
        left = ordered.cumsum(-1)[..., -1:] - ordered[..., ::2].sum(-1, True) - ordered[..., 1::2].sum(-1, True)
        return left / (left.std() + 1e-30), terms.tanh() * self.factor


def test_what_rounding_explains_is_not_held_against_a_program_and_said() -> None:
    report = equivalent(Cancelling(False), Cancelling(True), torch.randn(8, 257), steps=0)
    assert report.equal
    assert any(TELL_NOTHING in line for line in report.skipped)


@pytest.mark.parametrize("factor", [1.001, 2.0])
def test_the_rest_is_still_compared(factor: float) -> None:
    report = equivalent(Cancelling(False), Cancelling(True, factor), torch.randn(8, 257), steps=0)
    assert not report.equal
    assert report.failed is not None and report.failed.worst is not None and report.failed.worst.name != "0"


def test_a_well_conditioned_mistake_is_not_explained() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(16, 16), nn.Linear(16, 16)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.bias += 1e-3
    report = equivalent(model, other, torch.randn(4, 16), steps=0)
    assert not report.equal and not report.skipped


class Choosing(nn.Module):
    """Jumps where a weight, which training moves, is past a bound; its gradient is off by what rounding may do."""

    def __init__(self, off: float, bound: float, remembers: bool = False) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))
        self.off, self.bound, self.first = off, bound, self.small.detach().clone() if remembers else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        summed = (x * (self.large + 1e-3 * (1 + self.off) * self.small)).sum()
        small = self.small if self.first is None else self.first
        return {"summed": summed, "chosen": (small.detach() < self.bound).float() * x}


def _trained_to(off: float) -> float:
    torch.manual_seed(0)
    seen = observe(Choosing(off, 0.0), _CASE, tolerance_for(Choosing(off, 0.0)))
    return float(seen.updates["small"])


_CASE = Case("eval", "own", torch.ones(4, 3), "[4, 3]", steps=1)


def _compared(bound: float, remembers: bool) -> bool:
    models, found = (Choosing(0.0, bound), Choosing(2e-4, bound, remembers)), EquivalenceReport()
    result, _ = check_case(_CASE, *models, tolerance_for(models[0]), found, required=True)
    assert result is not None and not found.skipped
    return result.equal


def test_a_choice_after_training_is_compared_at_the_weights_that_training_gave() -> None:
    one, two = _trained_to(0.0), _trained_to(2e-4)
    between = (one + two) / 2
    assert (one < between) != (two < between)
    assert _compared(between, remembers=False)


def test_weights_remembered_from_before_training_are_found() -> None:
    between = _trained_to(0.0) / 2
    assert _compared(between, remembers=False)
    assert not _compared(between, remembers=True)


def test_a_tensor_that_differs_is_not_hidden_by_one_that_agrees_when_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is compared again keeps its place in the list, which was sorted before."""

    def again(deviations: list[Deviation], *_: object) -> list[Deviation]:
        return [Deviation(TRAINED, "agrees", excess=0.5), Deviation(TRAINED, "differs", excess=3.0)]

    monkeypatch.setattr(equivalence, "_at_its_own_weights", again)
    monkeypatch.setattr(equivalence, "_told", lambda deviations, *_: deviations)
    models = (Choosing(0.0, 0.0), Choosing(2e-4, (_trained_to(0.0) + _trained_to(2e-4)) / 2))
    result, _ = check_case(_CASE, *models, tolerance_for(models[0]), EquivalenceReport(), required=True)
    assert result is not None and not result.equal and result.worst.name == "differs"
