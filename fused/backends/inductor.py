"""Formulas compiled by inductor: one kernel per formula, setting and kind of input.

Inputs are normalized first: detached, contiguous, numbers as tensors without dimensions. On the CPU the rest is done
by :mod:`fused.backends.kernels`. On other devices it is `torch.compile`, which specializes on more than needed
(sizes 0 and 1, `requires_grad`, numbers, autocast, strides) and gives up after a few recompilations of one code
object: so every kind of input gets a separate code object.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from fused.backends import availability, kernels
from fused.torch_internals.modes import DisableTorchFunction, count_function_modes

Formula = Callable[..., Any]

_compiled: dict[Hashable, Formula] = {}
_serial = itertools.count()


def run(formula: Formula, args: Sequence[Any], statics: Mapping[str, Hashable], device: str) -> Any:
    """Run `formula(*args, **statics)` compiled, or uncompiled with a warning if compiling fails.

    Args:
        formula: plain torch operations; its only side effect may be writing to an argument that it returns.
        args: tensors, None, or numbers (which may change from call to call without a recompilation).
        statics: settings for which the code is specialized.
        device: device type of the tensors.
    """
    inputs = [None if arg is None else _normal(arg) for arg in args]
    if torch.is_grad_enabled() or torch.is_autocast_enabled(device) or count_function_modes():
        # Dynamo would trace into a mode of torch functions, such as a recording, and guard on it.
        with torch.no_grad(), torch.autocast(device, enabled=False), DisableTorchFunction():
            return _run(formula, inputs, statics, device)
    return _run(formula, inputs, statics, device)


def _run(formula: Formula, inputs: Sequence[Any], statics: Mapping[str, Hashable], device: str) -> Any:
    """Run the formula on inputs in their normal form, outside of any mode."""
    if device != "cpu":
        return _by_torch_compile(formula, inputs, statics, device)
    try:
        kernel = kernels.kernel_for(formula, inputs, statics)
    except kernels.TooManyKernels:
        return _too_often(formula, inputs, statics)
    except Exception as error:  # whatever tracing and compiling may raise
        return _uncompiled(formula, inputs, statics, device, error)
    return kernel(inputs)


def _too_often(formula: Formula, inputs: Sequence[Any], statics: Mapping[str, Hashable]) -> Any:
    result = formula(*inputs, **statics)
    availability.warn_once(
        f"fused: {formula.__name__} was recompiled too often; where no kernel of it fits the sizes it runs uncompiled"
    )
    return result


def _uncompiled(
    formula: Formula, inputs: Sequence[Any], statics: Mapping[str, Hashable], device: str, error: Exception
) -> Any:
    # First the formula, so that an error that is the caller's own comes out as itself.
    result = formula(*inputs, **statics)
    reason = f"compiling failed ({_first_line(error)})"
    availability.mark_broken("inductor", device, reason)
    availability.warn_once(
        f"fused: {reason}; the ops run on the reference backend, which is slower. Check that the C++ "
        'compiler (CXX) works, or choose fused.backend("reference") to say so yourself'
    )
    return result


def _by_torch_compile(formula: Formula, inputs: Sequence[Any], statics: Mapping[str, Hashable], device: str) -> Any:
    key = (formula, tuple(statics.items()), tuple(_kind(arg) for arg in inputs))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _specialize(formula, statics)
    try:
        return compiled(*inputs)
    except _failures() as error:
        from fused.torch_internals.compiler import FailOnRecompileLimitHit

        if isinstance(error, FailOnRecompileLimitHit):
            _compiled[key] = functools.partial(formula, **statics)
            return _too_often(formula, inputs, statics)
        return _uncompiled(formula, inputs, statics, device, error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@functools.cache
def _failures() -> tuple[type[Exception], ...]:
    try:
        from fused.torch_internals.compiler import FailOnRecompileLimitHit, TorchDynamoException
    except ImportError:
        return (ImportError,)
    return (TorchDynamoException, FailOnRecompileLimitHit, ImportError, OSError)


def _specialize(formula: Formula, statics: Mapping[str, Hashable]) -> Formula:
    def fused_formula(*inputs: Any) -> Any:
        return formula(*inputs, **statics)

    # Dynamo counts recompilations per code object: give each specialization its own.
    code = fused_formula.__code__.replace(co_name=f"fused_{formula.__name__}_{next(_serial)}")
    own = types.FunctionType(code, globals(), code.co_name, None, fused_formula.__closure__)
    compiled: Formula = torch.compile(own, dynamic=True, fullgraph=True)
    return compiled


def _normal(arg: Any) -> torch.Tensor:
    if isinstance(arg, torch.Tensor):
        return arg.detach().contiguous().resolve_neg()
    return _number(float(arg))


@functools.lru_cache(maxsize=1024)
def _number(value: float) -> torch.Tensor:
    # float64 without dimensions: takes no part in type promotion, so it acts like the Python number.
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float64)


def _kind(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        ones = tuple(size == 1 for size in arg.shape)
        return (arg.dtype, arg.device, ones, arg.is_inference())
    return arg
