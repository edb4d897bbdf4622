"""Interception of the calls of a model's submodules. The modules stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

CallHandler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Watch:
    """The modules and the handler of one :func:`intercepted_calls` block."""

    def __init__(self, members: Collection[nn.Module], handler: CallHandler) -> None:
        self.members, self.handler = members, handler
        self.inside: list[nn.Module] = []

    def handles(self, module: nn.Module) -> bool:
        return module in self.members and not (self.inside and self.inside[-1] is module)


class _Watches(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Watch] = []


_watches = _Watches()
_patched: dict[type, int] = {}
_patches: dict[type, Any] = {}
_lock = threading.Lock()


@contextmanager
def intercepted_calls(root: nn.Module, handler: CallHandler) -> Iterator[None]:
    """Pass each call of a submodule of ``root`` in this thread to ``handler(module, call, args, kwargs)``.

    ``call`` is the original call. Other models and other threads are unaffected. A class that overrides ``__call__``
    (transformers' checkpointing layers) is intercepted at its outermost ``__call__``.
    """
    with interceptable(root):
        _watches.stack.append(_Watch(set(root.modules()), handler))
        try:
            yield
        finally:
            _watches.stack.pop()


@contextmanager
def interceptable(root: nn.Module) -> Iterator[None]:
    """Patch ``__call__`` of the classes in ``root`` once for many :func:`intercepted_calls` inside, to save time."""
    owners = {
        owner
        for cls in {type(module) for module in root.modules()}
        for owner in cls.__mro__
        if issubclass(owner, nn.Module) and "__call__" in vars(owner)
    }
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(_patched_call(owner))
        yield


@contextmanager
def _patched_call(owner: type) -> Iterator[None]:
    with _lock:
        if not _patched.get(owner):
            patch = mock.patch.object(owner, "__call__", _watched(vars(owner)["__call__"]))
            patch.start()
            _patches[owner] = patch
        _patched[owner] = _patched.get(owner, 0) + 1  # last: what fails above leaves nothing counted
    try:
        yield
    finally:
        with _lock:
            _patched[owner] -= 1
            if _patched[owner] == 0:
                _patches.pop(owner).stop()


def unwatched(call: Any) -> Any:
    """Return the ``__call__`` of a class without the recording around it."""
    return getattr(call, "_unwatched", call)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watch = _watches.stack[-1] if _watches.stack else None
        if watch is None or not watch.handles(module):
            return original(module, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            watch.inside.append(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                watch.inside.pop()

        return watch.handler(module, call, args, kwargs)

    __call__._unwatched = original  # type: ignore[attr-defined]
    return __call__
