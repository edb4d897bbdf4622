"""What a forward does to the process, to its thread and to objects of Python's library around a call of a submodule."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import warnings
from collections.abc import Callable
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
from tests.adversary.process_effects import LOCK, Module, pair, refusal

VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
EVENT = threading.Event()


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
