"""``no_grad``, ``enable_grad``, ``autocast`` and ``sdpa_kernel`` blocks, as pairs of nodes.

In a graph a block is written as ``token = begin_…(…); …; end_region(token)``. Blocks still open when an exception is
raised are ended by :func:`closing`, the wrapper for functions of graphs with regions.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused.torch_internals.modes import set_grad_enabled
from schedule.capture.tracing.trace import Trace


class _Open(threading.local):
    def __init__(self) -> None:
        self.stack: list[AbstractContextManager[Any]] = []


_open = _Open()


def begin_grad_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Enter ``torch.set_grad_enabled(enabled)`` and return the token for :func:`end_region`."""
    previous = torch.is_grad_enabled()
    set_grad_enabled(enabled)
    return _opened(_GradMode(previous))


def begin_autocast(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> AbstractContextManager[Any]:
    """Enter ``torch.autocast`` and return the token for :func:`end_region`."""
    block = torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
    block.__enter__()
    return _opened(block)


def begin_sdpa_kernel(backends: Sequence[int], set_priority: bool) -> AbstractContextManager[Any]:
    """Enter ``torch.nn.attention.sdpa_kernel`` and return the token for :func:`end_region`."""
    block = sdpa_kernel([SDPBackend(number) for number in backends], set_priority)
    block.__enter__()
    return _opened(block)


def end_region(block: AbstractContextManager[Any]) -> None:
    """Leave a block entered by a ``begin_…`` function."""
    _open.stack.remove(block)
    block.__exit__(None, None, None)


def _opened(block: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    _open.stack.append(block)
    return block


class _GradMode(AbstractContextManager[Any]):
    def __init__(self, previous: bool) -> None:
        self.previous = previous

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self.previous)


REGION_FUNCTIONS = frozenset({begin_grad_mode, begin_autocast, begin_sdpa_kernel, end_region})


@contextmanager
def closing_regions() -> Iterator[None]:
    """Leave blocks still open after an exception, innermost first."""
    depth = len(_open.stack)
    try:
        yield
    finally:
        while len(_open.stack) > depth:
            _open.stack.pop().__exit__(None, None, None)


def closing(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run`` to leave its blocks when it raises or is stopped early, as in a recomputation."""

    def closed(*args: Any) -> Any:
        with closing_regions():
            return run(*args)

    return closed


class RegionTracker:
    """Writer of grad-mode and autocast blocks into the graph of ``tracer``."""

    def __init__(self, tracer: Trace) -> None:
        self.tracer = tracer
        self._grad: list[tuple[fx.Node, bool]] = []
        self._autocast: dict[int, fx.Node] = {}

    def handles(self, func: Any) -> bool:
        """Check whether ``func`` begins or ends a block."""
        return func is set_grad_enabled

    def on_call(self, func: Any, args: Any) -> None:
        """Write a change of grad mode: the end of the innermost block if it restores its old mode, else a new block."""
        enabled, current = args[0], torch.is_grad_enabled()
        func(enabled)
        if self._grad and self._grad[-1][1] == enabled:
            node, _ = self._grad.pop()
            self.tracer.emit(end_region, (node,))
        else:
            node = self.tracer.emit(begin_grad_mode, (enabled,))
            self._grad.append((node, current))

    def decides(self, question: str) -> bool:
        """Check whether a block of the forward determines ``torch.is_grad_enabled`` and similar functions."""
        return bool(self._grad) if "grad" in question else bool(self._autocast) and "autocast" in question

    def inlined(self, block: torch.autocast) -> None:
        """Write the start of ``block``, entered by the forward."""
        arguments = (block.device, block.fast_dtype, block._enabled, block._cache_enabled)
        self._autocast[id(block)] = self.tracer.emit(begin_autocast, arguments)

    def left(self, block: torch.autocast) -> None:
        """Write the end of ``block``."""
        self.tracer.emit(end_region, (self._autocast.pop(id(block)),))


class TrackedAutocast(AbstractContextManager[Any]):
    """Autocast block, written into the graph."""

    def __init__(self, regions: RegionTracker, block: torch.autocast) -> None:
        self._regions, self._block = regions, block

    def __enter__(self) -> Any:
        self._regions.inlined(self._block)
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._regions.left(self._block)
        return self._block.__exit__(*error)


class TrackedSdpaKernel(AbstractContextManager[None]):
    """``sdpa_kernel`` block, written into the graph. It is not entered: the setting is for the whole process."""

    def __init__(self, tracer: Trace, block: Any) -> None:
        given = inspect.signature(sdpa_kernel).bind(*block.args, **block.kwds).arguments
        backends = given["backends"]
        numbers = [int(each) for each in (backends if isinstance(backends, (list, tuple)) else [backends])]
        self._tracer, self._arguments = tracer, (numbers, given.get("set_priority", False))

    @staticmethod
    def is_one(value: Any) -> bool:
        """Check whether ``value`` was returned by ``sdpa_kernel``."""
        return isinstance(value, _GeneratorContextManager) and value.func is inspect.unwrap(sdpa_kernel)

    def __enter__(self) -> None:
        self._node = self._tracer.emit(begin_sdpa_kernel, self._arguments)

    def __exit__(self, *error: object) -> None:
        self._tracer.emit(end_region, (self._node,))
