"""Hooks on modules, including transformers' own.

transformers registers hooks on layers when hidden states or attentions are first requested, and never removes them.
They do nothing unless the forward of an enclosing model is collecting outputs. In a graph of the enclosing model the
hooks are part of the trace. A graph of only the layer is valid while no outputs are collected.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fused.torch_internals.torch_modules import has_global_hooks

_ON_ALL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_THEIRS = "transformers.utils.output_capturing"


def is_hooked(module: nn.Module) -> bool:
    """Check whether ``module`` has a hook other than transformers' own. Inlining the module would skip it."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return bool(module._forward_hooks) and not all(map(_captures, module._forward_hooks.values()))


def acts_on_all() -> bool:
    """Check whether a global module hook is registered, other than torch's own hooks (counters and observers)."""
    if not has_global_hooks():
        return False
    hooks = (hook for table in _ON_ALL for hook in getattr(torch.nn.modules.module, table).values())
    return not all(getattr(hook, "__module__", "").startswith("torch.") for hook in hooks)


def acts_now(module: nn.Module) -> bool:
    """Check whether a hook of ``module`` would do something in a call now."""
    return is_hooked(module) or (bool(module._forward_hooks) and bool(_collected()))


def first_hook(module: nn.Module) -> str:
    """Return the name of a hook of ``module``, for messages: the library that registered it is seldom the user's."""
    return _name_of(next(hook for table in _TABLES for hook in getattr(module, table).values()))


def own_forward(module: nn.Module) -> str:
    """Return the name of the forward that was set on the object ``module`` itself, or "" if there is none."""
    forward = vars(module).get("forward")
    return "" if forward is None else _name_of(forward.func if isinstance(forward, functools.partial) else forward)


def _name_of(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def runs_hooks_of(module: nn.Module, other: nn.Module) -> bool:
    """Check whether a call of ``module`` runs every hook of ``other``, because both have the same tables of hooks."""
    return all(not vars(other)[table] or vars(module)[table] is vars(other)[table] for table in _TABLES)


def _captures(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == _THEIRS and getattr(hook, "__name__", "") == "output_capturing_hook"


def _key(hook: Any) -> str:
    """Return the key collected by the hook, for example ``hidden_states``."""
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return str(cells["key"].cell_contents)


def _collector() -> Any:
    return getattr(sys.modules.get(_THEIRS), "_active_collector", None)


def is_collector(variable: Any) -> bool:
    """Check whether transformers' hooks collect into ``variable``; a graph collects without it."""
    return variable is not None and variable is getattr(_collector(), "context_var", None)


def _collected() -> Collection[str]:
    collector = _collector()
    return () if collector is None else (collector.get() or ())


def collecting_hooks(module: nn.Module) -> list[Any]:
    """Return transformers' hooks on ``module`` active in the running forward."""
    hooks, keys = module._forward_hooks.values(), _collected()
    return [hook for hook in hooks if keys and _captures(hook) and _key(hook) in keys]


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Hide calls in the block from enclosing models with output collection."""
    collector = _collector()
    if collector is None or not collector.get():
        yield
        return
    token = collector.set({})  # as transformers itself sets it: a dict of what is collected, here none
    try:
        yield
    finally:
        collector.reset(token)
