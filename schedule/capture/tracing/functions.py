"""Custom autograd functions, scripted functions and functions of some libraries, as one node each.

A function with a backward equal to the derivative of its forward is inlined instead.
"""

from __future__ import annotations

import importlib
import operator
import types
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.autograd import Function
from torch.jit import ScriptFunction
from torch.utils.checkpoint import CheckpointFunction

from fused.torch_internals.modes import DisableTorchFunction, function_mode_stack, is_torch_function_disabled
from schedule.capture.recording.source import user_line
from schedule.capture.recording.structure import leaves, map_structure
from schedule.capture.tracing.derivatives import inlined, is_derivative
from schedule.capture.tracing.trace import Trace
from schedule.capture.tracing.writes import written_tensors
from schedule.util.errors import TraceError
from schedule.util.internal_errors import perform

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
