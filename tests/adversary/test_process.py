"""Branches on what the process, its files and its settings answer, and on which objects the arguments are."""

from __future__ import annotations

import collections
import copy
import enum
import io
import logging
import os
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of

LOG = logging.getLogger(__name__)


class Asking(nn.Module):
    """Scales an activation by ``ask(self, y, *inputs)``."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.ask = ask

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = F.gelu(self.fc(x))
        factor: Any = self.ask(x, *others)
        return y * factor


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Listed(list):  # type: ignore[type-arg]
    pass


def compare(ask: Callable[..., Any], first: tuple[Any, ...], second: tuple[Any, ...], change: Any = None) -> None:
    """Optimize with ``first``, then make ``change`` and call with ``second``: equal to an untouched twin."""
    model = Asking(ask)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.optimize(model, first, cost_guard=False)
        torch.testing.assert_close(model(*first), twin(*first))
        if change is not None:
            change()
        for given in (second, first):
            torch.testing.assert_close(model(*given), twin(*given))


def rows() -> Tensor:
    return torch.randn(4, 8)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    limit, dtype, level, name = sys.getrecursionlimit(), torch.get_default_dtype(), LOG.level, _thread().name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "number").write_text("2")
    yield
    sys.setrecursionlimit(limit)
    torch.set_default_dtype(dtype)
    LOG.setLevel(level)
    _thread().name = name


def _thread() -> threading.Thread:
    return threading.current_thread()


class Base:
    """Has more subclasses later."""


DERIVED: list[type] = []

ASKED: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "file": (lambda *_: float(pathlib.Path("number").read_text()), lambda: pathlib.Path("number").write_text("3")),
    "exists": (lambda *_: 1 + os.path.exists("other"), lambda: pathlib.Path("other").touch()),
    "path exists": (lambda *_: 1 + pathlib.Path("more").exists(), lambda: pathlib.Path("more").touch()),
    "listdir": (lambda *_: len(os.listdir()), lambda: pathlib.Path("third").touch()),
    "recursion limit": (lambda *_: sys.getrecursionlimit(), lambda: sys.setrecursionlimit(2345)),
    "getenv": (lambda *_: 1 + (os.getenv("NOT_SET_YET") is None), lambda: os.environ.update(NOT_SET_YET="1")),
    "subclasses": (lambda *_: 1 + len(Base.__subclasses__()), lambda: DERIVED.append(type("Late", (Base,), {}))),
    "environ get": (
        lambda *_: 1 + (os.environ.get("NOT_SET_YET", "0") == "0"),
        lambda: os.environ.update(NOT_SET_YET="1"),
    ),
    "environ contains": (lambda *_: 1 + ("NOT_SET_YET" in os.environ), lambda: os.environ.update(NOT_SET_YET="1")),
    "logger": (lambda *_: 1 + LOG.isEnabledFor(logging.DEBUG), lambda: LOG.setLevel(logging.DEBUG)),
    "thread": (lambda *_: len(threading.current_thread().name), lambda: setattr(_thread(), "name", "n")),
    "numpy file": (lambda *_: float(np.load("a.npy")), lambda: np.save("a.npy", np.float32(5))),
    "default dtype": (lambda *_: torch.ones(3).element_size(), lambda: torch.set_default_dtype(torch.float64)),
    "dtype of a literal": (lambda x: torch.tensor(2.5).dtype.itemsize, lambda: torch.set_default_dtype(torch.float64)),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_the_process_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_YET", raising=False)
    np.save("a.npy", np.float32(2))
    ask, change = ASKED[name]
    x = rows()
    compare(ask, (x,), (x,), change)


SAME = rows()
ARGUMENTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "one object": (lambda x, y: 2 if x is y else 3, (rows(), rows()), (SAME, SAME)),
    "not one object": (lambda x, y: 2 if x is not y else 3, (SAME, SAME), (rows(), rows())),
    "a view of itself": (
        lambda x, y: 2 if y.contiguous() is y else 3,
        (rows(), rows()),
        (rows(), torch.ones(8, 4).t()),
    ),
    "found by identity": (lambda x, y: 2 if any(x is z for z in y) else 3, (rows(), [rows()]), (SAME, [SAME])),
    "id": (lambda x, y: 2 if id(x) == id(y) else 3, (rows(), rows()), (SAME, SAME)),
    "set": (lambda x, y: len({x, y}), (rows(), rows()), (SAME, SAME)),
    "one list": (lambda x, y, z: 2 if y is z else 3, (SAME, [1], [1]), (SAME, *[[1]] * 2)),
    "order of keys": (lambda x, y: len(next(iter(y))), (SAME, {"a": 1, "bb": 1}), (SAME, {"bb": 1, "a": 1})),
    "order of values": (lambda x, y: next(iter(y.values())), (SAME, {"a": 1, "b": 2}), (SAME, {"b": 2, "a": 1})),
    "ordered": (
        lambda x, y: 2 if isinstance(y, collections.OrderedDict) else 3,
        (SAME, {"a": 1}),
        (SAME, collections.OrderedDict(a=1)),
    ),
    "list": (lambda x, y: 2 if type(y) is list else 3, (SAME, [1]), (SAME, Listed([1]))),
    "recorded list": (lambda x, y: 2 if type(y) is list else 3, (SAME, Listed([1])), (SAME, [1])),
    "size": (lambda x, y: 2 if isinstance(y, torch.Size) else 3, (SAME, (1, 2)), (SAME, torch.Size((1, 2)))),
    "class": (lambda x, y: 2 if type(y) is Tensor else 3, (SAME, rows()), (SAME, nn.Parameter(rows()))),
    "parameter": (lambda x, y: 2 if isinstance(y, nn.Parameter) else 3, (SAME, rows()), (SAME, nn.Parameter(rows()))),
    "negative zero": (lambda x, y: 2 if str(y) == "0.0" else 3, (SAME, 0.0), (SAME, -0.0)),
    "enum": (lambda x, y: y.value, (SAME, Color.RED), (SAME, Color.BLUE)),
    "number of numpy": (lambda x, y: float(y), (SAME, np.float32(2)), (SAME, np.float32(3))),
    "kinds of numbers": (lambda x, y: 2 if isinstance(y, complex) else 3, (SAME, 1j), (SAME, rows())),
    "bytes": (lambda x, y: len(y), (SAME, b"a"), (SAME, b"ab")),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_the_arguments_are(name: str) -> None:
    compare(*ARGUMENTS[name])


@pytest.mark.parametrize("name", ["order of keys", "list", "class", "enum", "negative zero"])
def test_such_questions_leave_the_module_rewritten(name: str) -> None:
    ask, first, _ = ARGUMENTS[name]
    model = Asking(ask)
    assert schedule.optimize(model, first, cost_guard=False).applied
    model(*first)
    state = state_of(model)
    assert state is not None and state.fallbacks == 0


def test_the_number_of_calls_that_read_a_file() -> None:
    """Reading from an object that the forward makes is no question to the process, and one it cannot repeat."""
    x = rows()
    compare(lambda *_: float(io.StringIO("2.5").read()), (x,), (x,))


def test_libraries_are_still_told_that_a_trace_goes_on() -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    model = Asking(lambda x: 2 if isinstance(x, FakeTensor) or x.sum() < 1e9 else 3)
    assert schedule.optimize(model, rows(), cost_guard=False).applied
