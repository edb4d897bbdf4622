"""Objects of Python's library that a module holds: what they contain may change, whatever way it is read."""

from __future__ import annotations

import array
import collections
import configparser
import ctypes
import io
import queue
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from schedule.runtime.scheduled import state_of


class Holding(nn.Module):
    """Scales an activation by what ``read`` finds in ``held``."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.fc(x))
        factor: Any = self.read(self.held)
        return y * factor


class Plain:
    scale = 2.0

    def __init__(self) -> None:
        self.numbers = [1.0, 2.0]

    def generate(self) -> Iterator[float]:
        yield from self.numbers


ALIVE = Plain()
NUMBERED = {"a": 2.0}
Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]


def numbers() -> Any:
    return array.array("d", [2.0, 3.0])


def parsed() -> configparser.ConfigParser:
    made = configparser.ConfigParser()
    made["a"] = {"b": "2"}
    return made


def stepped() -> torch.optim.lr_scheduler.LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def scripted() -> Any:
    module = nn.Linear(2, 2)
    module.gain = 2.0
    return torch.jit.script(module)


def set_first(held: Any) -> None:
    held[0] = 5


def first_of(a: Any, b: Any) -> Any:
    return a


CASES: dict[str, Case] = {
    "item of an array": (numbers, lambda held: held[0], set_first),
    "sum of an array": (numbers, lambda held: sum(held), set_first),
    "length of an array": (numbers, lambda held: len(held), lambda held: held.append(1)),
    "list of an array": (numbers, lambda held: list(held)[-2], set_first),
    "loop over an array": (numbers, lambda held: [v for v in held][-2], set_first),
    "unpacked array": (numbers, lambda held: first_of(*held), set_first),
    "slice of an array": (numbers, lambda held: held[:1][0], set_first),
    "search in an array": (numbers, lambda held: 2 if 5.0 in held else 3, set_first),
    "compared array": (numbers, lambda held: 2 if held == array.array("d", [5, 3]) else 3, set_first),
    "truth of an array": (lambda: array.array("d"), lambda held: 2 if held else 3, lambda held: held.append(1)),
    "text of an array": (numbers, lambda held: len(str(held)), lambda held: held.append(1)),
    "bytes": (lambda: bytearray(b"ab"), lambda held: sum(held), set_first),
    "view of bytes": (lambda: memoryview(bytearray(b"ab")), lambda held: held[0], set_first),
    "ctypes": (lambda: (ctypes.c_double * 2)(2, 3), lambda held: sum(held), set_first),
    "number of ctypes": (lambda: ctypes.c_double(2), lambda h: h.value, lambda h: setattr(h, "value", 3)),
    "numpy": (lambda: np.array([2.0, 3.0]), lambda held: float(held.sum()), set_first),
    "buffer": (lambda: io.BytesIO(b"ab"), lambda h: len(h.getvalue()), lambda h: h.write(b"abcd") and None),
    "settings": (parsed, lambda h: float(h["a"]["b"]), lambda h: h["a"].__setitem__("b", "3")),
    "settings by method": (parsed, lambda h: h.getfloat("a", "b"), lambda h: h["a"].__setitem__("b", "3")),
    "queue": (queue.Queue, lambda held: 1 + held.qsize(), lambda held: held.put(1)),
    "event": (threading.Event, lambda held: 1 + held.is_set(), lambda held: held.set()),
    "lock": (threading.Lock, lambda held: 1 + held.locked(), lambda held: held.acquire() and None),
    "of a thread": (threading.local, lambda h: getattr(h, "x", 2.0), lambda h: setattr(h, "x", 3.0)),
    "counter": (lambda: collections.Counter(a=2), lambda h: h.total(), lambda h: h.update(a=1)),
    "order": (lambda: collections.OrderedDict(a=2, b=3), lambda h: h[next(iter(h))], lambda h: h.move_to_end("a")),
    "room of a deque": (
        lambda: collections.deque([2], maxlen=4),
        lambda held: held.maxlen,
        lambda held: collections.deque([2], maxlen=5),
    ),
    "list of Python": (lambda: collections.UserList([2]), lambda held: sum(held), lambda held: held.append(3)),
    "beyond a list": (
        lambda: [2],
        lambda held: 2 if any(v == 7 for v in iter(held)) else 3,
        lambda held: held.append(7),
    ),
    "compared namespace": (
        lambda: types.SimpleNamespace(a=2),
        lambda held: 2 if held == types.SimpleNamespace(a=3) else 5,
        lambda held: setattr(held, "a", 3),
    ),
    "weak mapping": (weakref.WeakValueDictionary, lambda h: 1 + len(h), lambda h: h.__setitem__("a", ALIVE)),
    "weak set": (weakref.WeakSet, lambda held: 1 + len(held), lambda held: held.add(ALIVE)),
    "weak reference": (lambda: weakref.ref(ALIVE), lambda h: len(h().numbers), lambda h: ALIVE.numbers.append(1)),
    "generator of numbers": (torch.Generator, lambda h: h.initial_seed() % 7 + 1, lambda h: h.manual_seed(3) and None),
    "schedule of a learning rate": (stepped, lambda h: h.get_last_lr()[0], lambda h: h._last_lr.insert(0, 3.0)),
    "scripted module": (scripted, lambda h: h.gain, lambda h: setattr(h, "gain", 3.0)),
    "method of a list": (lambda: [2.0].__getitem__, lambda h: h(0), lambda h: h.__self__.insert(0, 5.0)),
    "length by a method": (lambda: [2.0].__len__, lambda h: h(), lambda h: h.__self__.append(5.0)),
    "method of a dict": (lambda: {"a": 2.0}.get, lambda h: h("a"), lambda h: h.__self__.update(a=5.0)),
    "view of a dict": (NUMBERED.values, lambda held: sum(held), lambda held: NUMBERED.update(b=5.0)),
    "entry of a class": (Plain, lambda h: type(h).__dict__["scale"], lambda h: setattr(Plain, "scale", 7.0)),
    "delegated generator": (Plain, lambda held: sum(held.generate()), lambda held: held.numbers.append(4.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_it_contains_is_guarded_however_it_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "scale", 2.0)
    make, read, change = CASES[name]
    held, x = make(), torch.randn(3, 8)
    model, twin = Holding(held, read), Holding(held, read)
    twin.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.optimize(model, x, cost_guard=False)
        torch.testing.assert_close(model(x), twin(x))
        if (other := change(held)) is not None:
            model.held = twin.held = other
        torch.testing.assert_close(model(x), twin(x))


@pytest.mark.parametrize("name", ["sum of an array", "bytes", "queue", "lock", "counter", "order", "weak set"])
def test_such_reads_leave_the_module_rewritten(name: str) -> None:
    make, read, _ = CASES[name]
    model, x = Holding(make(), read), torch.randn(3, 8)
    assert schedule.optimize(model, x, cost_guard=False).applied
    model(x)
    state = state_of(model)
    assert state is not None and state.fallbacks == 0
