"""Functions from indices to indices (for example, positions of images in a prompt), written as calls of the graph.

Their steps depend on the data, token by token: a step-by-step trace would be valid for these data only, but a call is
valid for any data. A function becomes a call if its arguments and results are only integers, flags and numbers, and it
changes nothing. A first trace finds the functions with data-dependent steps; a second trace writes them as calls.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import fx, nn

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.tensor_kinds import FakeTensor
from schedule.capture.effects.autograd_functions import writes
from schedule.capture.effects.effects import has_effect, is_local, uses_random
from schedule.capture.graph.output_structure import structure
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.python.instrument import original_code
from schedule.capture.recording.data_dependence import is_shaped_by_data
from schedule.capture.recording.structure import TensorSpec, leaves
from schedule.util.errors import TraceError
from schedule.util.nodes import last_node

_NUMBERS = (bool, int, float, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool, torch.dtype, torch.device)


def indices_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)``, as the graph target for a function of indices."""
    return function(*args, **kwargs)


class Following(Protocol):
    """Interface of the evaluator of functions called by a forward."""

    @property
    def assigned(self) -> int:
        """Number of attributes assigned so far."""

    def call_function(self, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function(*args, **kwargs)`` and trace its code."""


class IndexFunctions:
    """Functions of indices of one trace.

    Args:
        tracer: the trace.
        known: the functions to write as calls.

    Attributes:
        outermost: further candidates; of nested calls the outermost.
        innermost: further candidates; of nested calls the innermost.
        refused: whether a known function does more than a call of the graph may do.
    """

    def __init__(self, tracer: Trace, known: frozenset[CodeType]) -> None:
        self.tracer, self.known = tracer, known
        self.outermost: set[CodeType] = set()
        self.innermost: set[CodeType] = set()
        self.refused = False
        self._inside = False
        self._replaced: list[list[fx.Node]] = []

    # -- finding them ----------------------------------------------------------------------------------------

    def notice(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record the enclosing functions of indices if ``func`` depends on data."""
        frame = sys._getframe(2)
        if not is_shaped_by_data(func, args) and not _lists_numbers(func, frame):
            return
        locations: list[CodeType] = []
        while frame.f_back is not None and not self._is_forward(frame):
            if self._may_take_indices(frame) and (location := self._location(frame)) is not None:
                locations.append(location)
            frame = frame.f_back
        self.innermost.update(locations[:1])
        self.outermost.update(locations[-1:])

    def choices(self) -> list[frozenset[CodeType]]:
        """Return candidate sets of functions to write as calls, best first."""
        return list(dict.fromkeys(frozenset(each) for each in (self.outermost, self.innermost) if each))

    def _is_forward(self, frame: FrameType) -> bool:
        return frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)

    def _may_take_indices(self, frame: FrameType) -> bool:
        """Check whether all tensor arguments are indices. Other arguments are checked at the call."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [leaf for name in names if name != "self" for _, leaf in leaves(frame.f_locals.get(name))]
        found = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        return bool(found) and _are_indices(found)

    def _location(self, frame: FrameType) -> CodeType | None:
        """Return the original code of ``frame``, or None if it is not instrumented or a graph cannot call it."""
        code = original_code(frame.f_code)
        return None if code is frame.f_code or "<locals>" in code.co_qualname else code

    # -- calling them ----------------------------------------------------------------------------------------

    def handles(
        self, following: Following, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """Return a thunk to write the function as a call of the graph, or None to trace through it."""
        if self._inside or function.__code__ not in self.known or not writes(self.tracer):
            return None
        module = args[0] if args and isinstance(args[0], nn.Module) else None
        given = args if module is None else args[1:]
        if (module is not None and not self._is_watched(module)) or not _are_indices((given, kwargs)):
            return None
        return lambda: self._call(following, self._target(function, module), function, args, given, kwargs)

    def _is_watched(self, module: nn.Module) -> bool:
        """Check whether the tracer sees assignments of ``module`` to its attributes."""
        path = self.tracer.path_of(module)
        return path is not None and ("." not in path or path in self.tracer.inlined)

    def _target(self, function: FunctionType, module: nn.Module | None) -> Callable[[], Any]:
        """Return a thunk for the graph node of the function."""
        if module is None:
            named = vars(sys.modules.get(function.__module__, sys)).get(function.__name__)
            found = named if named is not None and inspect.unwrap(named) is function else function
            return lambda: self.tracer.node_of(found)
        path = self.tracer.path_of(module)
        return lambda: self.tracer.graph.get_attr(f"{path}.{function.__name__}" if path else function.__name__)

    def _call(
        self,
        following: Following,
        target: Callable[[], Any],
        function: Any,
        args: tuple[Any, ...],
        given: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        tracer = self.tracer
        guards, last, before = dict(tracer.guards), last_node(tracer.graph), self._state(following, (given, kwargs))
        self._inside = True
        try:
            value = following.call_function(function, args, kwargs)
        finally:
            self._inside = False
        steps = _after(last, tracer.graph)
        changed = before != self._state(following, (given, kwargs))
        if changed or not _are_results(value) or not all(map(_is_quiet, steps)):
            self.refused = True
            return value
        tracer.guards.clear()
        tracer.guards.update(guards)
        self._replaced.append(steps)
        with DisableTorchFunction():
            operands, options = tracer.as_nodes(given), tracer.as_nodes(kwargs)
            node = tracer.emit(indices_of, (target(), *operands), options)
            value = tracer.track(value, node)
            tracer.outputs[node] = structure(value)
        return value

    def _state(self, following: Following, value: Any) -> list[Any]:
        """Return the contents of ``value``, the versions of its tensors, and the count of assigned attributes."""
        with DisableTorchFunction():
            identities = [(path, id(x), x._version if isinstance(x, torch.Tensor) else 0) for path, x in leaves(value)]
        return [identities, following.assigned]

    def remove_replaced(self) -> None:
        """Remove the traced steps of functions written as calls, except sizes used elsewhere.

        Raises:
            TraceError: another value of such a function is used elsewhere, because it was stored in an attribute.
        """
        for steps in reversed(self._replaced):
            for node in reversed(steps):
                if not node.users and node not in self.tracer.guards:
                    node.graph.erase_node(node)
                elif isinstance(node.meta.get("spec"), TensorSpec) and node.op != "get_attr":
                    raise TraceError("a function of indices leaves a tensor where others find it")


def _lists_numbers(func: Any, frame: FrameType) -> bool:
    """Check whether ``func`` is called by ``tensor.tolist()``."""
    if func.__name__ not in ("unbind", "item"):
        return False
    return FakeTensor.tolist.__code__ in [caller.f_code for caller in (frame, frame.f_back) if caller is not None]


def _are_indices(value: Any) -> bool:
    return all(_is_index(leaf) for _, leaf in leaves(value))


def _is_index(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return isinstance(leaf, _NUMBERS)
    with DisableTorchFunction():
        return not (leaf.is_floating_point() or leaf.is_complex())


def _are_results(value: Any) -> bool:
    """Check whether a graph can verify a result of this kind in later calls."""
    parts = [leaf for _, leaf in leaves(value)]
    return value is not None and _are_indices(value) and not any(isinstance(leaf, str) for leaf in parts)


def _is_quiet(node: fx.Node) -> bool:
    """Check whether ``node`` has no effect visible outside its function."""
    return node.op != "call_module" and not uses_random(node) and (not has_effect(node) or is_local(node))


def _after(last: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    found = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        found.append(node)
    return found[::-1]
