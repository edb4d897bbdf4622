"""Custom autograd functions, scripted functions and functions of some libraries, as one node each.

A function with a backward equal to the derivative of its forward is inlined instead.

Autograd functions with a backward equal to the derivative of their forward, written by hand only for speed.

They are inlined, so that a rule sees what they compute. The two are compared: the function is run on random numbers
and may use only analytic elementwise operations. Analytic functions that agree on a neighborhood agree everywhere.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.jit import ScriptFunction
from torch.utils.checkpoint import CheckpointFunction

from fused.torch_internals.modes import (
    DisableTorchFunction,
    TorchDispatchMode,
    function_mode_stack,
    is_torch_function_disabled,
)
from schedule.capture.effects.writes import written_tensors
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.recording.structure import leaves, map_structure
from schedule.capture.recording.user_lines import user_line
from schedule.util.errors import TraceError
from schedule.util.internal_errors import perform

# -- Autograd functions with a backward equal to the derivative of their forward ----------------------------


_ANALYTIC = {"add", "sub", "rsub", "mul", "div", "neg", "pow", "reciprocal", "exp", "tanh", "sigmoid", "erf"}
_ANALYTIC |= {"sin", "cos", "detach", "alias", "clone", "_to_copy"}
_SAMPLE = 3  # per dimension

_known: dict[type[Function], bool] = {}


class _Other(Exception):
    """Operation other than the analytic ones."""


class _OnlyAnalytic(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _ANALYTIC or (name == "pow" and not _is_whole(args[1])):
            raise _Other(name)
        return perform(func, *args, **(kwargs or {}))


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent >= 0


class _Context:
    """Placeholder for autograd's context while a forward is run only for its result."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Do nothing: no tensor is saved."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Refuse, because the derivative is then different."""
        raise _Other("mark_non_differentiable")

    mark_dirty = mark_non_differentiable

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: it does not change the result."""


def inlined(cls: type[Function], args: tuple[Any, ...]) -> Any:
    """Compute ``cls.apply(*args)`` step by step by running the forward."""
    return cls.forward(*args) if _in_two_parts(cls) else cls.forward(_Context(), *args)


def is_derivative(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether the backward of ``cls`` is the derivative of its forward, for tensors of one shape."""
    if kwargs or not all(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in args):
        return False
    with DisableTorchFunction(), torch.enable_grad():  # sizes that a tracer knows stay open
        if any(arg.shape != args[0].shape for arg in args):
            return False
        if cls not in _known:
            _known[cls] = _agrees(cls, len(args), (_SAMPLE,) * max(args[0].ndim, 1))
    return _known[cls]


def _agrees(cls: type[Function], count: int, shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    *given, incoming = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(count + 1)
    )
    try:
        with _OnlyAnalytic():
            own = _gradients(cls.apply(*given), given, incoming)
        derived = _gradients(inlined(cls, tuple(given)), given, incoming)
    except (_Other, RuntimeError, TypeError, ValueError, AttributeError):  # it takes other arguments than a sample
        return False
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(own, derived, strict=True))


def _gradients(out: Any, given: list[torch.Tensor], incoming: torch.Tensor) -> list[torch.Tensor]:
    if not isinstance(out, torch.Tensor) or out.shape != incoming.shape:
        raise _Other("several outputs")
    return [out, *torch.autograd.grad(out, given, incoming.detach())]


def _in_two_parts(cls: type[Function]) -> bool:
    return inspect.getattr_static(cls, "setup_context") is not inspect.getattr_static(Function, "setup_context")


# -- Custom autograd functions ------------------------------------------------------------------------------


_LIBRARIES = frozenset({"einx"})
"""Libraries whose functions compute tensors from tensors and settings alone, by code that they compile and keep."""


def is_of_library(function: types.FunctionType) -> bool:
    """Check whether a call of ``function`` is one operation, however it is written."""
    return str(function.__globals__.get("__name__")).partition(".")[0] in _LIBRARIES


class Applied:
    """Graph target to apply an autograd function, with its own forward and backward, or another function."""

    def __init__(self, function: type[Function] | ScriptFunction | types.FunctionType) -> None:
        self.function = function
        self.__name__ = str(function.name if isinstance(function, ScriptFunction) else function.__name__)
        self.__module__ = __name__  # what begins with "torch" would be printed as if torch had it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.function.apply if isinstance(self.function, type) else self.function
        return perform(run, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Applied) and self.function is other.function

    def __hash__(self) -> int:
        return hash((Applied, self.function))

    def __reduce__(self) -> Any:
        if not isinstance(self.function, ScriptFunction):
            return Applied, (self.function,)
        written: Any = self.function._torchdynamo_inline  # type: ignore[attr-defined]
        return _scripted, (written.__module__, written.__qualname__)


def _scripted(module: str, name: str) -> Applied:
    return Applied(operator.attrgetter(name)(importlib.import_module(module)))


class FunctionTracker:
    """Writer of autograd functions and others as nodes of one trace. Checkpoints are inlined."""

    def __init__(self, tracer: Trace) -> None:
        self.tracer = tracer

    def apply(self, cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply ``cls.apply(*args, **kwargs)`` and write it as a node, unless it can be inlined.

        Raises:
            TraceError: it is passed a function or module, so a node would hide calls of the model; or it changes its
                arguments in place.
        """
        if cls is CheckpointFunction or not writes(self.tracer):
            return perform(cls.apply, *args, **kwargs)
        if is_derivative(cls, args, kwargs):
            return inlined(cls, args)
        with DisableTorchFunction():
            return _written(self.tracer, Applied(cls), cls.apply, args, kwargs)

    def called(
        self, function: ScriptFunction | types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a TorchScript function, or one of a library, and write it as a node."""
        if not writes(self.tracer):
            return perform(function, *args, **kwargs)
        with DisableTorchFunction():
            return _written(self.tracer, Applied(function), function, args, kwargs)


def writes(tracer: Trace) -> bool:
    """Check whether ``tracer`` records calls now, rather than only evaluating one."""
    return not is_torch_function_disabled() and tracer in function_mode_stack()


def _written(
    tracer: Trace, target: Applied, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if any(isinstance(leaf, nn.Module) or callable(leaf) for _, leaf in leaves((args, kwargs))):
        raise _refused(f"the function {target.__name__} is given a function or module to call")
    node: fx.Node = tracer.emit(target, *tracer.handed(args, kwargs))
    tracer.containers.note((args, kwargs), node)
    real_args, real_kwargs = map_structure(args, tracer.value_of), map_structure(kwargs, tracer.value_of)
    tracer.recording.fake_mode.observe()
    with tracer.recording.fake_mode:
        value = perform(apply, *real_args, **real_kwargs)
    written_tensors(tracer, node, (args, kwargs))
    node.meta["draws"] = True  # user code: at run time it may
    return tracer.track(value, node)


def _refused(why: str) -> TraceError:
    return TraceError(
        why,
        where=user_line(),
        fix="keep the module that applies it a leaf (`leaves=(…,)`), or schedule its submodules instead",
    )
