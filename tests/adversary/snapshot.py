"""Everything that Python code can reach from an object, as plain data that two runs can be compared by."""

from __future__ import annotations

import collections
import enum
import functools
import logging
import random
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from schedule.capture.specializing.specialization import original_class
from schedule.runtime.scheduled import STATE

Snapshot = dict[str, Any]
"""Path from the root → what is there: ``("kind", …)``, ``("same as", path)``, or a :class:`Tensor`."""

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_LEFT_ALONE = (types.ModuleType, logging.Logger, threading.Thread, type(threading.Lock()), type(threading.RLock()))
_HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}


@dataclass
class Tensor:
    """A tensor's value and everything else about it that a user can see."""

    value: torch.Tensor
    facts: tuple[Any, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Tensor:
        """Copy ``tensor``."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            facts = (type(tensor).__name__, tensor.dtype, tuple(tensor.shape), tensor.requires_grad, str(tensor.device))
            return Tensor(tensor.detach().clone(), facts)


@dataclass
class _Walk:
    """One walk of the reachable state.

    Attributes:
        found: what was found so far.
        seen: id of each object with an identity → its first path.
        alive: the objects of ``seen``, so that no id is used twice.
    """

    found: Snapshot = field(default_factory=dict)
    seen: dict[Any, str] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)

    def visit(self, path: str, value: Any) -> None:
        """Note ``value``, and what it holds."""
        pending = [(path, value)]
        while pending:
            at, each = pending.pop()
            parts = list(self._noted(at, each))
            pending += [(f"{at}{step}", part) for step, part in reversed(parts)]

    def _noted(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _ATOMS):
            self.found[path] = (type(value).__name__, _exact(value))
            return
        if isinstance(value, enum.Enum) or value is Ellipsis or value is NotImplemented:
            self.found[path] = (type(value).__qualname__, repr(value))
            return
        if id(value) in self.seen:
            self.found[path] = ("same as", self.seen[id(value)])
            return
        self.seen[id(value)] = path
        self.alive.append(value)
        if isinstance(value, torch.Tensor):
            yield from self._tensor(path, value)
        elif isinstance(value, type):
            self.found[path] = ("class", value.__qualname__)
        elif isinstance(value, _LEFT_ALONE):
            self.found[path] = (type(value).__name__,)
        else:
            cls = original_class(value) if isinstance(value, nn.Module) else type(value)
            self.found[path] = (cls.__qualname__, _summary(value))
            yield from _parts(value)

    # Tensors at different offsets of one memory are not noted: ``qkv_merge`` puts parameters side by side.
    def _tensor(self, path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        self.found[path] = Tensor.of(tensor)
        try:
            storage = ("storage", tensor.untyped_storage()._cdata, tensor.storage_offset())
            self.alive.append(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):  # it has none, as on the meta device
            return
        if self.seen.setdefault(storage, path) != path:
            self.found[f"{path}: shares memory with"] = ("same as", self.seen[storage])
        if tensor.is_leaf:
            yield ".grad", tensor.grad
            yield ".__dict__", vars(tensor)


def _exact(value: Any) -> Any:
    for base in (str, int, float, bytes):  # subclasses may compare as they like
        if isinstance(value, base) and type(value) not in (base, bool):
            return base.__repr__(value)
    return repr(value) if isinstance(value, (torch.dtype, torch.device, torch.layout, complex)) else value


def _summary(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict, set, frozenset, collections.deque)):
        return len(value)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return value.__qualname__
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, np.generic):
        return (str(value.dtype), value.item())
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{_key(key)}]", item
    elif isinstance(value, (list, tuple, collections.deque)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, (set, frozenset)):
        for item in sorted(value, key=repr):
            yield f"{{{item!r}}}" if isinstance(item, _ATOMS) else "{…}", item
    elif isinstance(value, types.FunctionType):
        yield ".__defaults__", value.__defaults__
        yield ".__dict__", vars(value)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if name not in ("__class__", "__classdict__"):
                yield f".<{name}>", _cell_contents(cell)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    yield from _attributes(value)


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return Ellipsis


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, (*_ATOMS, tuple, enum.Enum)) else f"<{type(key).__qualname__}>"


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)):
        return
    table = getattr(value, "__dict__", None)
    if isinstance(table, dict):
        for name, item in table.items():
            if name in _HOOKS and isinstance(item, dict):  # their keys are numbered process-wide
                yield f".{name}", list(item.values())
            elif name != STATE:
                yield f".{name}", item
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f".{name}", getattr(value, name, Ellipsis)


def snapshot(**roots: Any) -> Snapshot:
    """Walk what can be reached from ``roots``, with one idea of identity for all of them."""
    walk = _Walk()
    for name, value in roots.items():
        walk.visit(name, value)
    return walk.found


def world_state(modules: Mapping[str, types.ModuleType]) -> dict[str, Any]:
    """The variables of Python modules and the attributes of the classes in them, except functions and classes."""
    found: dict[str, Any] = {}
    for stem, module in modules.items():
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {f"{stem}.{name}.{n}": v for n, v in vars(value).items() if _is_data(n, v)}
                found |= {
                    f"{stem}.{name}.{n}()": v for n, v in vars(value).items() if isinstance(v, types.FunctionType)
                }
            elif isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
                found[f"{stem}.{name}()"] = value
            elif _is_data(name, value):
                found[f"{stem}.{name}"] = value
    return found


def _is_data(name: str, value: Any) -> bool:
    if (
        name.startswith("__")
        or isinstance(value, (type, *_LEFT_ALONE))
        or type(value).__module__ in ("typing", "__future__")
    ):
        return False
    return not callable(value) and not hasattr(type(value), "__get__")


def random_states() -> tuple[Any, ...]:
    """The states of the generators of torch, Python and numpy."""
    name, keys, *rest = np.random.get_state()
    return (torch.get_rng_state().numpy().tobytes(), random.getstate(), (name, keys.tobytes(), *rest))


def process_state() -> dict[str, Any]:
    """Functions of torch and Python by identity, and modes: what nobody may leave changed."""
    import builtins
    import math
    import operator

    owners: dict[str, Any] = {
        each.__name__: each
        for each in (builtins, math, operator, random, torch, torch.Tensor, torch.nn.functional, nn.Module, nn.Linear)
    }
    found: dict[str, Any] = {}
    for name, owner in owners.items():
        found |= {f"{name}.{n}": id(v) for n, v in vars(owner).items() if callable(v) and n not in _BY_TORCH}
    module = sys.modules["torch.nn.modules.module"]
    found |= {
        name: len(value)
        for name, value in vars(module).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }
    modes = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_num_threads(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        sys.gettrace(),
    )
    return {**found, "modes": modes}


_BY_TORCH = {"manual_seed", "__init__", "__setstate__"}  # torch.compile itself wraps these, for good

# -- comparing ------------------------------------------------------------------------------------------------------

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def differences(
    ours: Any, theirs: Any, exact: bool = False, path: str = "", tolerance: float = 0.0, slack: float = 1.0
) -> Iterator[str]:
    """What differs between two observations, a line each; ``tolerance``, or that of the dtypes, ``slack`` times."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if ours.facts != theirs.facts:
            yield f"{path}: {_told(ours.facts)}, should be {_told(theirs.facts)}"
        elif not _close(ours.value, theirs.value, exact, tolerance, slack):
            yield f"{path}: values differ by {_distance(ours.value, theirs.value)}"
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            if key not in ours or key not in theirs:
                here = ours if key in ours else theirs
                yield f"{path}{key}: {'is too much' if key in ours else 'is missing'}: {_told(here[key])}"
            else:
                yield from differences(ours[key], theirs[key], exact, f"{path}{key}", tolerance, slack)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        if not all(map(_equal, ours, theirs)):
            yield f"{path}: {_told(ours)}, should be {_told(theirs)}"
    elif not _equal(ours, theirs):
        yield f"{path}: {_told(ours)}, should be {_told(theirs)}"


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        apart, scale = abs(ours - theirs), max(abs(ours), abs(theirs))
        return repr(ours) == repr(theirs) or 0 < apart <= 2e-5 * scale  # 0.0 and -0.0 are not equal
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def _close(ours: torch.Tensor, theirs: torch.Tensor, exact: bool, tolerance: float, slack: float) -> bool:
    if ours.is_meta or theirs.is_meta:
        return ours.is_meta and theirs.is_meta
    if exact or ours.dtype not in _TOLERANCES:
        floating = ours.is_floating_point()
        return torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs)) if floating else torch.equal(ours, theirs)
    tolerance = slack * (tolerance or _TOLERANCES[ours.dtype])
    ours, theirs = ours.double(), theirs.double()
    finite = theirs[theirs.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * max(scale, 1e-3), equal_nan=True)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    if not ours.is_floating_point() or not ours.numel():
        return f"{ours.flatten()[:4].tolist()}, should be {theirs.flatten()[:4].tolist()}"
    apart = (ours.double() - theirs.double()).abs().max()
    return f"{float(apart):.3g} where the largest is {float(theirs.double().abs().max()):.3g}"


def _told(value: Any) -> str:
    text = repr(value.facts if isinstance(value, Tensor) else value)
    return text if len(text) < 120 else f"{text[:117]}..."
