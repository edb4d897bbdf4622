"""Branches on questions that a call answers: about sizes, their texts, and numbers that are drawn on the way."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule

Question = Callable[[Tensor, Tensor], Any]

SIZES: dict[str, Question] = {
    "is_same_size": lambda x, y: torch.is_same_size(x, y),
    "is_same_size by keywords": lambda x, y: torch.is_same_size(input=x, other=y),
    "x.is_same_size": lambda x, y: x.is_same_size(y),
    "broadcast_shapes": lambda x, y: torch.broadcast_shapes(y.shape, (1, 4))[0] > 2,
    "nbytes": lambda x, y: y.nbytes > 32,
    "hash of a shape": lambda x, y: hash(tuple(y.shape)) == hash((2, 4)),
}
KINDS: dict[str, Question] = {
    "isinstance of int": lambda x, y: isinstance(y.shape[0], int),
    "isinstance of a symbolic number": lambda x, y: isinstance(y.shape[0], torch.SymInt),
    "isinstance of several": lambda x, y: isinstance(y.shape[0] / 2, (float, str)),
    "type": lambda x, y: type(y.shape[0]) is int,
    "type of a quotient": lambda x, y: type(y.shape[0] / 2) is float,
    "divmod": lambda x, y: divmod(y.shape[0], 2)[1],
    "bits": lambda x, y: (y.shape[0] & 1) ^ 1 | 0,
}
TEXTS: dict[str, Question] = {
    "str of a shape": lambda x, y: str(tuple(y.shape)) == "(2, 4)",
    "f-string of a size": lambda x, y: f"{y.shape[0]}" == "2",
    "not equal": lambda x, y: f"{y.shape[0]}" != "2",
    "less": lambda x, y: f"{y.shape[0]}" < "3",
    "chained": lambda x, y: "1" < f"{y.shape[0]}" < "3",
    "in a tuple": lambda x, y: f"{y.shape[0]}" in ("2", "3"),
    "in a text": lambda x, y: "2" in f"{y.shape[0]}",
    "format": lambda x, y: "{}".format(y.shape[0]) == "2",  # noqa: UP032
    "percent": lambda x, y: "%s" % y.shape[0] == "2",  # noqa: UP031
    "joined": lambda x, y: ",".join([f"{y.shape[0]}", "4"]) == "2,4",
    "added": lambda x, y: ("a" + f"{y.shape[0]}") == "a2",
    "dict.get": lambda x, y: {"2": True}.get(f"{y.shape[0]}", False),
    "item of a dict": lambda x, y: {"2": 1, "3": 0, "1": 0, "5": 0}[f"{y.shape[0]}"],
    "key of a dict": lambda x, y: {f"{y.shape[0]}": 1}.get("2", 0),
    "set": lambda x, y: len({f"{y.shape[0]}", "2"}) == 1,
    "startswith": lambda x, y: f"{y.shape[0]}".startswith("2"),
    "int of a text": lambda x, y: int(f"{y.shape[0]}") > 2,
    "len of a text": lambda x, y: len(f"{y.shape[0]}") > 1,
    "letters of a text": lambda x, y: f"{y.shape[0]}"[0] == "2",
    "loop over a text": lambda x, y: [letter for letter in f"{y.shape[0]}"] == ["2"],
    "sorted": lambda x, y: sorted([f"{y.shape[0]}", "3"])[0] == "2",
    "hasattr": lambda x, y: hasattr(Table, f"rows_{y.shape[0]}"),
    "getattr with a default": lambda x, y: getattr(Table, f"rows_{y.shape[0]}", False),
    "repr": lambda x, y: repr(y.shape) == "torch.Size([2, 4])",
    "a function of the user": lambda x, y: is_two(f"{y.shape[0]}"),
    "method of a text": lambda x, y: begins(f"{y.shape[0]}"),
    "kept in an object": lambda x, y: Named(f"{y.shape[0]}").name == "2",
    "split": lambda x, y: f"{y.shape[0]} rows".split()[0] == "2",
    "eval": lambda x, y: float(f"{y.shape[0]}") == 2.0,
}


class Table:
    rows_2 = True


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


def is_two(text: str) -> bool:
    return text == "2"


def begins(text: str) -> bool:
    return text.startswith("2")


class Asking(nn.Module):
    """Goes one way or the other by the answer to a question."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.proj, self.question = nn.Linear(4, 4), question

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.gelu(self.proj(x))
        if self.question(x, y):
            return z * 2
        return z * 3


def _inputs(rows: int, others: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(others, 4)


def _as_untouched(module: nn.Module, batch: tuple[Tensor, ...], calls: list[tuple[Tensor, ...]]) -> None:
    """The same as an untouched twin for every call, random states included, whether it was rewritten or refused."""
    twin = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, batch, cost_guard=False)
        assert report.applied or report.select(status="skipped"), "it has something to rewrite"
        for call in calls:
            after = []
            for each in (twin, module):
                torch.manual_seed(7)
                random.seed(7)
                after.append((each(*call), torch.get_rng_state(), random.getstate()))
            (expected, state, other), (got, own_state, own_other) = after
            torch.testing.assert_close(got, expected)
            assert torch.equal(own_state, state) and own_other == other


@pytest.mark.one_in(2)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", [*SIZES, *KINDS, *TEXTS])
def test_an_answer_about_sizes_is_not_baked_in(name: str, training: bool) -> None:
    module = Asking({**SIZES, **KINDS, **TEXTS}[name]).train(training)
    calls = [_inputs(*sizes) for sizes in ((2, 2), (3, 3), (2, 1), (2, 5), (1, 1), (2, 2))]
    _as_untouched(module, _inputs(2, 2), calls)


class Dropping(nn.Module):
    """Drops in evaluation too, in ways that ``training`` does not tell."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "rand": lambda x: x * torch.rand(x.shape),
    "normal in place": lambda x: x + torch.empty(x.shape).normal_(),
    "Python's": lambda x: x * random.random(),
}


class Late(nn.Module):
    """Branches on data once a submodule has drawn."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drop, self.proj = Dropping(draw), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = F.gelu(self.proj(self.drop(x)))
        if z[0, 0] > 0:
            return z * 2
        return z * 3


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_drawn_once_where_a_graph_finds_that_it_does_not_hold(name: str, training: bool) -> None:
    _as_untouched(Late(DRAWS[name]).train(training), (torch.randn(2, 4),), [(torch.randn(2, 4),) for _ in range(6)])
