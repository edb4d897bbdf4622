"""Effects of a forward on objects of Python's library around a call of a submodule, and what their functions read."""

from __future__ import annotations

import array
import contextlib
import io
import queue
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.adversary.process_effects import LOCK, Module, pair, refusal

QUEUE = queue.Queue[int]()
NUMBERS, BYTES = array.array("i"), bytearray()


# -- effects on objects --------------------------------------------------------------------------------------


def acquired(child: Module, h: Tensor) -> Tensor:
    LOCK.acquire()
    h = child(h)
    LOCK.release()
    return h


def written(child: Module, h: Tensor) -> Tensor:
    sys.stdout.write("hi ")
    return child(h)


def _doing(act: Callable[[], Any]) -> Callable[[Module, Tensor], Tensor]:
    def around(child: Module, h: Tensor) -> Tensor:
        act()
        return child(h)

    return around


TEXT = io.StringIO()
ACTS: dict[str, tuple[Callable[[Module, Tensor], Tensor], Callable[[], Any]]] = {
    "queue": (_doing(lambda: QUEUE.put(1)), QUEUE.qsize),
    "array": (_doing(lambda: NUMBERS.append(1)), lambda: len(NUMBERS)),
    "bytes": (_doing(lambda: BYTES.append(1)), lambda: len(BYTES)),
    "text": (_doing(lambda: TEXT.write("a")), lambda: len(TEXT.getvalue())),
    "saved array": (_doing(lambda: np.save("saved.npy", np.ones(2))), lambda: None),
    "array in a file": (_doing(lambda: np.ones(2).tofile("made.bin")), lambda: None),
}


@pytest.fixture
def emptied(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    QUEUE.queue.clear()
    NUMBERS[:], BYTES[:] = array.array("i"), b""
    TEXT.truncate(0)
    yield


@pytest.mark.parametrize("name", ACTS)
def test_what_has_an_effect_is_not_called_as_a_question(name: str, emptied: None) -> None:
    act, count = ACTS[name]
    module, twin, x, report = pair(act)
    assert f"{__file__}:" in refusal(report)
    before = count()
    twin(x)
    added = None if before is None else count() - before
    module(x)
    assert before is None or (added and count() == before + 2 * added)


def test_a_lock_is_not_acquired_by_a_trace() -> None:
    module, twin, x, report = pair(acquired, lambda: 1 + LOCK.locked())
    assert not LOCK.locked() and f"{__file__}:" in refusal(report)
    torch.testing.assert_close(module(x), twin(x))


def test_a_stream_is_written_once_by_a_call() -> None:
    module, twin, x, report = pair(written)
    assert f"{__file__}:" in refusal(report)
    texts = []
    for each in (module, twin):
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            each(x)
        texts.append(stream.getvalue())
    assert texts == ["hi ", "hi "]


# -- reads by functions of Python's library -------------------------------------------------------------------


class Scale:
    factor = 2.0


def scaled(h: Tensor, factor: float = 2.0) -> Tensor:
    return h * factor


PROXY: Any = weakref.proxy(scaled)
READS: dict[str, tuple[Callable[[Module, Tensor], Tensor], Any, str, Any]] = {
    "static attribute": (lambda c, h: h * inspect_static(Scale, "factor"), Scale, "factor", 3.0),
    "members": (lambda c, h: h * dict(inspect_members(Scale))["factor"], Scale, "factor", 3.0),
    "signature": (lambda c, h: h * signature_of(scaled).parameters["factor"].default, scaled, "__defaults__", (5.0,)),
    "proxy of a function": (lambda c, h: PROXY(h), scaled, "__defaults__", (5.0,)),
    "folder": (lambda c, h: h * len(expanded("~")), None, "", None),
    "decoded bytes": (lambda c, h: h * len(BYTES.decode()), BYTES, "", None),
}
from inspect import getattr_static as inspect_static  # noqa: E402
from inspect import getmembers as inspect_members  # noqa: E402
from inspect import signature as signature_of  # noqa: E402
from os.path import expanduser as expanded  # noqa: E402


@pytest.mark.parametrize("name", READS)
def test_what_a_function_of_the_library_reads(name: str, monkeypatch: pytest.MonkeyPatch, emptied: None) -> None:
    read, owner, attribute, value = READS[name]
    monkeypatch.setenv("HOME", "/home")
    BYTES.append(97)
    module, twin, x, _ = pair(read)
    torch.testing.assert_close(module(x), twin(x))
    if owner is None:
        monkeypatch.setenv("HOME", "/another")
    elif owner is BYTES:
        BYTES.append(97)
    else:
        monkeypatch.setattr(owner, attribute, value)
    torch.testing.assert_close(module(x), twin(x))
