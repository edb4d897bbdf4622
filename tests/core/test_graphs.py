"""Graphs are compared with the modules they were made from: each graph once, whatever the number of modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import schedule
from schedule.capture.recording.structure import tensors
from schedule.core import graphs
from schedule.util.errors import TraceError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Baked(Layer):
    """Gives large numbers, which :func:`wrong_if_large` takes for wrong ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1000


def wrong_if_large(got: object, expected: object) -> str:
    """Stand in for the comparison of a graph with its module."""
    return "it differs" if any(bool((each > 100).any()) for each in tensors(got)) else ""


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _traced(model: nn.Module) -> dict[str, TraceError]:
    sch = schedule.create_schedule(model, (torch.randn(3, 5, 4),))
    failed = sch.tree.graphs.ensure([module for name, module in model.named_modules() if name.count(".") == 1])
    return {sch.tree.node(module).path: error for module, error in failed.items()}


@pytest.mark.parametrize("layers", [1, 6])
def test_like_modules_are_compared_once_a_run(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(graphs, "difference", lambda got, expected: compared.append(got) or "")
    assert not _traced(Stack(*(Layer() for _ in range(layers))))
    assert len(compared) == 2


def test_what_is_wrong_of_one_is_wrong_of_all_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "difference", wrong_if_large)
    failed = _traced(Stack(Layer(), Baked(), Layer(), Baked()))
    assert sorted(failed) == ["layers.1", "layers.3"]
    for path, error in failed.items():
        assert f"graph of {path} is wrong at other shapes" in error.why
