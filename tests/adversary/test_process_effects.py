"""What a forward does to the process, to its thread and to objects of Python's library around a call of a submodule."""

from __future__ import annotations

import array
import contextlib
import contextvars
import io
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import schedule
from schedule.runtime.scheduled import state_of

Module = Callable[[Tensor], Tensor]
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
LOCK, EVENT, QUEUE = threading.Lock(), threading.Event(), queue.Queue[int]()
NUMBERS, BYTES = array.array("i"), bytearray()


class Late(nn.Module):
    """Asks only once it is told to, so that the runs of scheduling see no difference."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self.ask, self.asks = ask, False

    def forward(self, h: Tensor) -> Tensor:
        factor: Any = self.ask() if self.asks else 1
        return h * factor


class Around(nn.Module):
    """Calls ``around(child, h)`` between two layers."""

    def __init__(self, around: Callable[[Module, Tensor], Tensor], ask: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.around, self.child = around, Late(ask)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        return self.second(self.around(self.child, h))


def pair(around: Any, ask: Callable[[], Any] = lambda: 1) -> tuple[Around, Around, Tensor, schedule.Report]:
    """Return a scheduled module, an untouched twin, an input and the report."""
    module, twin, x = Around(around, ask), Around(around, ask), torch.randn(2, 8)
    twin.load_state_dict(module.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = schedule.optimize(module, x, cost_guard=False)
    module.child.asks = twin.child.asks = True
    return module, twin, x, report


def refusal(report: schedule.Report) -> str:
    """Return why the whole module was not rewritten."""
    return "\n".join(map(str, report.select(status="skipped")))


# -- settings of the process and of the thread ---------------------------------------------------------------


def variable(child: Module, h: Tensor) -> Tensor:
    token = VARIABLE.set(2.0)
    h = child(h)
    VARIABLE.reset(token)
    return h


def event(child: Module, h: Tensor) -> Tensor:
    EVENT.set()
    h = child(h)
    EVENT.clear()
    return h


def deterministic(child: Module, h: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True)
    h = child(h)
    torch.use_deterministic_algorithms(False)
    return h


def default_dtype(child: Module, h: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    h = child(h)
    torch.set_default_dtype(torch.float32)
    return h


def count_of_threads(child: Module, h: Tensor) -> Tensor:
    count = torch.get_num_threads()
    torch.set_num_threads(count + 1)
    h = child(h)
    torch.set_num_threads(count)
    return h


def autocast_by_function(child: Module, h: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    h = child(h)
    torch.set_autocast_enabled("cpu", False)
    return h


def anomalies(child: Module, h: Tensor) -> Tensor:
    torch.autograd.set_detect_anomaly(True)
    h = child(h)
    torch.autograd.set_detect_anomaly(False)
    return h


def recursion(child: Module, h: Tensor) -> Tensor:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 7)
    h = child(h)
    sys.setrecursionlimit(limit)
    return h


def numpy_errors(child: Module, h: Tensor) -> Tensor:
    old = np.seterr(divide="ignore")
    h = child(h)
    np.seterr(**old)
    return h


def seeded(child: Module, h: Tensor) -> Tensor:
    torch.manual_seed(3)
    return child(h)


def filters(child: Module, h: Tensor) -> Tensor:
    warnings.simplefilter("ignore", ResourceWarning)
    h = child(h)
    warnings.filters.pop(0)  # type: ignore[attr-defined]
    return h


class Doubling(TorchFunctionMode):
    """Doubles sines."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {})) * (2 if function is torch.sin else 1)


class Entering(Doubling):
    def __enter__(self) -> Any:
        return super().__enter__()


def _within(make: Callable[[], Any]) -> Callable[[Module, Tensor], Tensor]:
    def around(child: Module, h: Tensor) -> Tensor:
        with make():
            return child(h)

    return around


def _stacked(make: Callable[[], Any]) -> Callable[[Module, Tensor], Tensor]:
    def around(child: Module, h: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(make())
            return child(h)

    return around


def _by_hand(make: Callable[[], Any]) -> Callable[[Module, Tensor], Tensor]:
    def around(child: Module, h: Tensor) -> Tensor:
        block = make()
        block.__enter__()
        h = child(h)
        block.__exit__(None, None, None)
        return h

    return around


def anomaly_is_detected() -> Any:
    return 1 + torch.is_anomaly_enabled()


def sine() -> Any:
    return torch.sin(torch.ones(()))


def count_of_filters() -> Any:
    return len(warnings.filters)


SETTINGS: dict[str, tuple[Callable[[Module, Tensor], Tensor], Callable[[], Any]]] = {
    "ContextVar": (variable, VARIABLE.get),
    "lock": (_within(lambda: LOCK), lambda: 1 + LOCK.locked()),
    "lock on a stack": (_stacked(lambda: LOCK), lambda: 1 + LOCK.locked()),
    "lock by hand": (_by_hand(lambda: LOCK), lambda: 1 + LOCK.locked()),
    "event": (event, lambda: 1 + EVENT.is_set()),
    "deterministic": (deterministic, lambda: 1 + torch.are_deterministic_algorithms_enabled()),
    "default dtype": (default_dtype, lambda: torch.get_default_dtype().itemsize),
    "threads": (count_of_threads, torch.get_num_threads),
    "autocast": (autocast_by_function, lambda: 1 + torch.is_autocast_enabled("cpu")),
    "anomalies": (anomalies, anomaly_is_detected),
    "block of anomalies": (_within(lambda: torch.autograd.set_detect_anomaly(True)), anomaly_is_detected),
    "device": (_within(lambda: torch.device("meta")), lambda: 1 + torch.empty(0).is_meta),
    "function mode": (_within(Doubling), sine),
    "function mode by super": (_within(Entering), sine),
    "function mode on a stack": (_stacked(Doubling), sine),
    "recursion limit": (recursion, sys.getrecursionlimit),
    "errors of numpy": (numpy_errors, lambda: 1 + (np.geterr()["divide"] == "ignore")),
    "block of numpy": (
        _within(lambda: np.errstate(divide="ignore")),
        lambda: 1 + (np.geterr()["divide"] == "ignore"),
    ),
    "seed": (seeded, lambda: torch.initial_seed() % 7 + 1),
    "generators": (_within(torch.random.fork_rng), lambda: 1),
    "filters of warnings": (filters, count_of_filters),
    "caught warnings": (_within(warnings.catch_warnings), count_of_filters),
    "saved tensors": (_within(lambda: saved_tensors_hooks(torch.sin, torch.cos)), lambda: 1),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_around_a_call_is_made(name: str) -> None:
    around, ask = SETTINGS[name]
    module, twin, x, report = pair(around, ask)
    expected = twin(x)
    torch.testing.assert_close(module(x), expected)
    assert f"{__file__}:" in refusal(report), "refused, with its line"
    assert not LOCK.locked() and not EVENT.is_set() and torch.get_default_dtype() is torch.float32


def test_gradients_through_hooks_on_saved_tensors() -> None:
    around = _within(lambda: saved_tensors_hooks(lambda t: t * 2, lambda t: t))
    module, twin, x, _ = pair(around, lambda: nn.Parameter(torch.ones(16)) * 3)
    for each in (module, twin):
        each(x).sum().backward()
    torch.testing.assert_close(module.first.weight.grad, twin.first.weight.grad)


# -- blocks that a graph makes -------------------------------------------------------------------------------


def inference(child: Module, h: Tensor) -> Tensor:
    with torch.inference_mode():
        z = child(h.detach())
    return h + z.clone()


@torch.inference_mode()
def decorated(child: Module, h: Tensor) -> Tensor:
    return child(h) * 2


def flags() -> Any:
    return torch.backends.cudnn.flags(enabled=False, deterministic=True)


BLOCKS: dict[str, tuple[Callable[[Module, Tensor], Tensor], Callable[[], Any]]] = {
    "inference": (inference, lambda: 1 + torch.is_inference_mode_enabled()),
    "inference by a decorator": (
        lambda child, h: h + decorated(child, h).clone(),
        lambda: 1 + torch.is_inference_mode_enabled(),
    ),
    "no_grad": (_within(torch.no_grad), lambda: 1 + torch.is_grad_enabled()),
    "autocast": (_within(lambda: torch.autocast("cpu", enabled=True)), lambda: 1 + torch.is_autocast_enabled("cpu")),
    "autocast by hand": (
        _by_hand(lambda: torch.autocast("cpu", enabled=True)),
        lambda: 1 + torch.is_autocast_enabled("cpu"),
    ),
    "no_grad by hand": (_by_hand(torch.no_grad), lambda: 1 + torch.is_grad_enabled()),
    "sdpa_kernel": (
        _within(lambda: sdpa_kernel(SDPBackend.MATH)),
        lambda: 1 + torch.backends.cuda.flash_sdp_enabled(),
    ),
    "flags": (_within(flags), lambda: 1 + torch.backends.cudnn.deterministic),
    "flags by hand": (_by_hand(flags), lambda: 1 + torch.backends.cudnn.deterministic),
    "nothing": (_within(contextlib.nullcontext), lambda: 2),
    "profiled": (_within(lambda: torch.profiler.record_function("part")), lambda: 2),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_part_of_the_graph(name: str) -> None:
    module, twin, x, report = pair(*BLOCKS[name])
    assert report.applied
    x.requires_grad_()
    out, expected = module(x), twin(x)
    torch.testing.assert_close(out, expected)
    assert out.requires_grad == expected.requires_grad
    (gradient,), (expected_gradient,) = (torch.autograd.grad(y.sum(), x, allow_unused=True) for y in (out, expected))
    assert (gradient is None) == (expected_gradient is None)
    if gradient is not None:
        torch.testing.assert_close(gradient, expected_gradient)
    state = state_of(module)
    assert state is not None and state.fallbacks <= 1  # the child asks a new question, in a new graph


class Returning(nn.Module):
    """Returns what it makes in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, bool]:
        h = F.gelu(self.first(x))
        with torch.inference_mode():
            z, asked = h * 2, torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        return self.second(h), z, asked


def test_a_result_of_inference_mode_is_an_inference_tensor() -> None:
    module, x = Returning(), torch.randn(2, 8)
    assert schedule.optimize(module, x, cost_guard=False).applied
    _, made, asked = module(x)
    assert made.is_inference() and asked and not torch.is_inference_mode_enabled()
    state = state_of(module)
    assert state is not None and state.fallbacks == 0


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
