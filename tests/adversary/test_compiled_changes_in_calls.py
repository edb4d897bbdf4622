"""What a submodule changes in a compiled call, compared with an untouched model, compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adversary.changing import Child, running_graphs


class Reader(nn.Module):
    """Calls a method of its class after its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child([self])

    def tail(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.child(x))


def other_tail(self: Reader, x: Tensor) -> Tensor:
    return x + 1


def change_method(m: Any) -> None:
    type(m).tail = other_tail


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    tail = Reader.tail
    torch._dynamo.reset()
    yield
    restore(tail)


def restore(tail: Any) -> None:
    """Undo every change."""
    Reader.tail = tail  # type: ignore[method-assign]


@pytest.mark.parametrize("early", [False, True])
def test_compiled_code_computes_what_it_does_of_an_untouched_model(early: bool) -> None:
    original, tail = Reader(), Reader.tail
    module = copy.deepcopy(original)
    _, x = running_graphs(module)
    results = []
    for each in (original, module):
        torch._dynamo.reset()
        run = torch.compile(each, backend="eager")
        if early:
            run(x)
        each.child.change, each.child.holder[:] = change_method, [original]
        results.append(run(x))
        restore(tail)
    torch.testing.assert_close(results[1], results[0])


def test_a_compiled_graph_runs_without_changes() -> None:
    module = Reader()
    twin, x = running_graphs(module)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), twin(x))
