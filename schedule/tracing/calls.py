"""Watching the calls of a model's submodules, without touching the modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

CallHandler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def intercepted_calls(root: nn.Module, handler: CallHandler) -> Iterator[None]:
    """Within, a call of a submodule of ``root`` in this thread becomes ``handler(module, call, args, kwargs)``.

    ``call`` is the call that would have happened. Other models and other threads are unaffected. A class that
    overrides ``__call__`` (transformers' checkpointing layers) is watched at its outermost ``__call__``.
    """
    thread = threading.get_ident()
    members = set(root.modules())
    owners = {
        owner
        for module in members
        for owner in type(module).__mro__
        if issubclass(owner, nn.Module) and "__call__" in vars(owner)
    }
    inside: list[nn.Module] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or module not in members or (inside and inside[-1] is module):
                return original(module, *args, **kwargs)

            def call(*args: Any, **kwargs: Any) -> Any:
                inside.append(module)
                try:
                    return original(module, *args, **kwargs)
                finally:
                    inside.pop()

            return handler(module, call, args, kwargs)

        return __call__

    with ExitStack() as patches:
        for owner in owners:
            patches.enter_context(mock.patch.object(owner, "__call__", watched(vars(owner)["__call__"])))
        yield
