"""Forwards that ask for the layout of an argument: a graph of a dense one is not for sparse ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule

DENSE = torch.randn(3, 4)
LAYOUTS = {"dense": DENSE, "coo": DENSE.to_sparse(), "csr": DENSE.to_sparse_csr(), "mkldnn": DENSE.to_mkldnn()}
QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "is_sparse": lambda x: x.is_sparse,
    "layout": lambda x: x.layout is not torch.strided,
    "is_sparse_csr": lambda x: x.is_sparse_csr,
    "is_mkldnn": lambda x: x.is_mkldnn,
    "of a result": lambda x: (x * 1).is_sparse if x.layout in (torch.strided, torch.sparse_coo) else False,
}


class Asking(nn.Module):
    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.question, self.bias = question, nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        factor = 3 if self.question(x) else 2
        return F.gelu(x.to_dense() * factor + self.bias)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("recorded", ["dense", "coo"])
@pytest.mark.filterwarnings("ignore::schedule.FallbackWarning", "ignore:Sparse")
def test_each_layout_gets_its_own_answer(question: str, recorded: str) -> None:
    torch.manual_seed(0)
    model = Asking(QUESTIONS[question])
    twin = copy.deepcopy(model)
    schedule.optimize(model, LAYOUTS[recorded], cost_guard=False)
    with torch.no_grad():
        for x in LAYOUTS.values():
            torch.testing.assert_close(model(x), twin(x))
