"""The text of a tensor is refused like any other text that holds sizes or data, and so is nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule

X = torch.randn(3, 4)


class Model(nn.Module):
    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(4, 8), nn.Linear(8, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x))) * float(self.read(x))


READS: dict[str, Callable[[Tensor], Any]] = {
    "str": lambda x: len(str(torch.tensor(1 / 3))),
    "repr": lambda x: len(repr(torch.ones(2))),
    "format": lambda x: len(f"{torch.zeros(1)}"),
    "str of an argument": lambda x: len(str(x)),
    "format of a shape": lambda x: len(f"{x.shape}"),
}


@pytest.mark.parametrize("name", READS)
def test_it_is_no_error(name: str) -> None:
    torch.manual_seed(0)
    model = Model(READS[name])
    torch.manual_seed(0)
    twin = Model(READS[name])
    report = schedule.optimize(model, X, rules="all", cost_guard=False)
    assert report.applied or all("string" in each.reason for each in report.entries)
    for x in (X, X * 1e6, torch.randn(5, 4), torch.randn(7, 4)):
        torch.testing.assert_close(model(x), twin(x))


def test_a_process_that_pretends_to_have_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that no graph takes runs the original forward there too."""
    torch.manual_seed(0)
    model = Model(lambda x: x.dim())
    schedule.optimize(model, X, rules="all", cost_guard=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert model(torch.randn(2, 3, 4)).shape == (2, 3, 4)
