"""Tensors that rounding alone moves by more than any tolerance: two right programs agree on none of their digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from schedule.verify import equivalent
from schedule.verify.equivalence import TELL_NOTHING


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
