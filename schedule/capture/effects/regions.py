"""Blocks of grad mode, inference mode, ``autocast``, ``sdpa_kernel`` and ``torch.backends…flags``, as pairs of nodes.

In a graph a block is written as ``token = begin_…(…); …; end_region(token)``. Blocks still open when an exception is
raised are ended by :func:`closing`, the wrapper for functions of graphs with regions.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused.torch_internals.modes import set_grad_enabled
from schedule.capture.graph.trace_interface import Trace


class _Open(threading.local):
    def __init__(self) -> None:
        self.stack: list[AbstractContextManager[Any]] = []


_open = _Open()


def begin_grad_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Enter ``torch.set_grad_enabled(enabled)`` and return the token for :func:`end_region`."""
    previous = torch.is_grad_enabled()
    set_grad_enabled(enabled)
    return _pushed(_GradMode(previous))


def begin_autocast(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> AbstractContextManager[Any]:
    """Enter ``torch.autocast`` and return the token for :func:`end_region`."""
    block = torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
    block.__enter__()
    return _pushed(block)


def begin_inference_mode(enabled: bool) -> AbstractContextManager[Any]:
    """Enter ``torch.inference_mode(enabled)`` and return the token for :func:`end_region`."""
    block = torch.inference_mode(enabled)
    block.__enter__()
    return _pushed(block)


def begin_sdpa_kernel(backends: Sequence[int], set_priority: bool) -> AbstractContextManager[Any]:
    """Enter ``torch.nn.attention.sdpa_kernel`` and return the token for :func:`end_region`."""
    block = sdpa_kernel([SDPBackend(number) for number in backends], set_priority)
    block.__enter__()
    return _pushed(block)


def begin_backend_flags(module: str, function: str, flags: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Enter a block of ``torch.backends``, such as ``torch.backends.cudnn.flags(enabled=False)``.

    Args:
        module: module of ``function``, such as ``"torch.backends.cudnn"``.
        function: function that returns the context manager, such as ``"flags"``.
        flags: its arguments.

    Returns:
        The token for :func:`end_region`.
    """
    block = getattr(sys.modules[module], function)(**flags)
    block.__enter__()
    return _pushed(block)


def end_region(block: AbstractContextManager[Any]) -> None:
    """Leave a block entered by a ``begin_…`` function."""
    _open.stack.remove(block)
    block.__exit__(None, None, None)


def _pushed(block: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    _open.stack.append(block)
    return block


class _GradMode(AbstractContextManager[Any]):
    def __init__(self, previous: bool) -> None:
        self.previous = previous

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self.previous)


REGION_FUNCTIONS = frozenset({begin_grad_mode, begin_inference_mode, begin_autocast, begin_sdpa_kernel})
REGION_FUNCTIONS |= {begin_backend_flags, end_region}


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


_Block = torch.inference_mode | torch.autocast
_BLOCKS = (torch.inference_mode, torch.autocast)


class RegionTracker:
    """Writer of grad-mode, inference-mode and autocast blocks into the graph of ``tracer``."""

    def __init__(self, tracer: Trace) -> None:
        self.tracer = tracer
        self._grad: list[tuple[fx.Node, bool]] = []
        self._blocks: dict[_Block, fx.Node] = {}
        self.flag_blocks = 0  # open blocks that set flags of torch's kernels

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
        inference, autocast = (any(isinstance(each, kind) for each in self._blocks) for kind in _BLOCKS)
        if "grad" in question:
            return bool(self._grad) or inference
        return inference if "inference" in question else autocast and "autocast" in question

    def inlined(self, block: _Block) -> None:
        """Write the start of ``block``, entered by the forward."""
        if isinstance(block, torch.inference_mode):
            node = self.tracer.emit(begin_inference_mode, (block.mode,))
        else:
            arguments = (block.device, block.fast_dtype, block._enabled, block._cache_enabled)
            node = self.tracer.emit(begin_autocast, arguments)
        self._blocks[block] = node

    def left(self, block: _Block) -> None:
        """Write the end of ``block``."""
        self.tracer.emit(end_region, (self._blocks.pop(block),))


class TrackedBlock(AbstractContextManager[Any]):
    """Autocast or inference-mode block, written into the graph."""

    def __init__(self, regions: RegionTracker, block: _Block) -> None:
        self._regions, self._block = regions, block

    def __enter__(self) -> Any:
        self._regions.inlined(self._block)
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._regions.left(self._block)
        return self._block.__exit__(*error)


class TrackedFlags(AbstractContextManager[None]):
    """Block that sets flags of torch's kernels, written into the graph.

    It is not entered while the forward is traced: the flags are those of the whole process.
    """

    def __init__(self, tracer: Trace, regions: RegionTracker, block: Any) -> None:
        self._tracer, self._regions = tracer, regions
        self._begin, self._arguments = _begin_of(block)

    def __enter__(self) -> None:
        self._node = self._tracer.emit(self._begin, self._arguments)
        self._regions.flag_blocks += 1

    def __exit__(self, *error: object) -> None:
        self._regions.flag_blocks -= 1
        self._tracer.emit(end_region, (self._node,))


def sets_flags(block: Any) -> bool:
    """Check whether ``block`` was returned by ``sdpa_kernel`` or by a function of ``torch.backends``."""
    if not isinstance(block, _GeneratorContextManager):
        return False
    module = getattr(block.func, "__module__", None) or ""
    if not module.startswith("torch.backends."):
        return _is_sdpa_kernel(block)
    return getattr(getattr(sys.modules.get(module), block.func.__name__, None), "__wrapped__", None) is block.func


def _is_sdpa_kernel(block: Any) -> bool:
    return block.func is inspect.unwrap(sdpa_kernel)


def _begin_of(block: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function that enters ``block`` again and its arguments."""
    given = inspect.signature(block.func).bind(*block.args, **block.kwds).arguments
    if _is_sdpa_kernel(block):
        backends = given["backends"]
        numbers = [int(each) for each in (backends if isinstance(backends, (list, tuple)) else [backends])]
        return begin_sdpa_kernel, (numbers, given.get("set_priority", False))
    return begin_backend_flags, (block.func.__module__, block.func.__name__, dict(given))
