"""What a submodule changes in a compiled call, compared with an untouched model, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adversary.changing import Child, running_graphs

SET = {f"entry {number}" for number in range(40)}
FROZEN = frozenset(SET)


class Reader(nn.Module):
    """Reads sets, a method of its class and a function of torch after the call of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Child([self])

    def tail(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        gain = (2.0 if "entry" in SET else 1.0) + (4.0 if "entry" in FROZEN else 0.0)
        return self.tail(torch.sin(y)) * gain


def other_tail(self: Reader, x: Tensor) -> Tensor:
    return x + 1


def change_set(m: Any) -> None:
    SET.add("entry")


def replace_set(m: Any) -> None:
    global FROZEN
    FROZEN = frozenset({*FROZEN, "entry"})


def change_method(m: Any) -> None:
    type(m).tail = other_tail


def change_function(m: Any) -> None:
    torch.sin = torch.cos


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    tail, sin = Reader.tail, torch.sin
    torch._dynamo.reset()
    yield
    restore(tail, sin)


def restore(tail: Any, sin: Any) -> None:
    """Undo every change."""
    global FROZEN
    SET.discard("entry")
    FROZEN, Reader.tail, torch.sin = FROZEN - {"entry"}, tail, sin  # type: ignore[method-assign]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("change", [change_set, replace_set, change_method, change_function])
def test_compiled_code_computes_what_it_does_of_an_untouched_model(change: Callable[[Any], None], early: bool) -> None:
    original, tail, sin = Reader(), Reader.tail, torch.sin
    module = copy.deepcopy(original)
    _, x = running_graphs(module)
    results = []
    for each in (original, module):
        torch._dynamo.reset()
        run = torch.compile(each, backend="eager")
        if early:
            run(x)
        each.child.change, each.child.holder[:] = change, [original]
        results.append(run(x))
        restore(tail, sin)
    torch.testing.assert_close(results[1], results[0])


def test_a_compiled_graph_runs_without_changes() -> None:
    module = Reader()
    twin, x = running_graphs(module)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), twin(x))
