"""Sizes of the results of any operation on tensors, by torch's own shape functions.

Slower by far than the rules of :mod:`schedule.capture.shapes.symbolic_sizes`, and sometimes with conditions that the
operation does not need, such as which library multiplies. It is asked for where no rule is known.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn

from fused.torch_internals.tensor_kinds import SymbolicSizes
from schedule.capture.effects.effects import has_effect
from schedule.capture.graph.scalars import scalar_of, symbolic
from schedule.capture.graph.trace_interface import Sizes
from schedule.capture.guards.own_forward import has_own_forward
from schedule.capture.guards.plain_values import is_atom
from schedule.capture.recording.hooks import is_hooked
from schedule.capture.recording.structure import TensorSpec, map_structure

_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)


class _Unknown(Exception):
    """Unknown value of an argument."""


def derived_size(sizes: Sizes, node: fx.Node, dim: int, value: int) -> Any:
    """Return size ``dim`` of the result of ``node``, ``value`` in the recorded run, by the sizes of its arguments.

    What torch's shape function decides by sizes becomes a guard. Returns None if they are not known, or do not decide.
    """
    shapes = SymbolicSizes()
    try:
        size = shapes.expressed(_Derivation(sizes, shapes).computed(node).shape[dim])
        conditions = list(shapes.conditions())
    except (_Unknown, *_FAILURES):
        return None
    scalar = scalar_of(size)
    if (size if scalar is None else scalar.value) != value:
        return None
    for condition in conditions:
        bool(condition)  # a guard
    return size


class _Derivation:
    """Computation of one node on tensors without data."""

    def __init__(self, sizes: Sizes, shapes: SymbolicSizes) -> None:
        self.sizes, self.shapes = sizes, shapes
        self.symbols: dict[fx.Node, Any] = {}

    def computed(self, node: fx.Node) -> Any:
        if node.op not in ("call_function", "call_method", "call_module") or node.meta.get("opaque"):
            raise _Unknown
        if node.op != "call_module" and has_effect(node):
            raise _Unknown
        args, kwargs = map_structure((node.args, dict(node.kwargs)), self.argument)
        if node.op == "call_method":
            return self.shapes.run(getattr(args[0], str(node.target)), *args[1:], **kwargs)
        function = node.target if node.op == "call_function" else self.module(node)
        return self.shapes.run(function, *args, **kwargs)  # type: ignore[arg-type]

    def argument(self, given: Any) -> Any:
        if not isinstance(given, fx.Node):
            return given
        spec = given.meta.get("spec")
        if isinstance(spec, TensorSpec):
            return self.tensor(given, spec)
        if type(spec) is int:
            return self.number(symbolic(self.sizes.tracer, given, spec), spec)
        return self.computed(given)

    def tensor(self, node: fx.Node, spec: TensorSpec) -> Any:
        known = [self.sizes.assumed(node, dim, size) for dim, size in enumerate(spec.shape)]
        if None in known:
            raise _Unknown
        sizes = [self.number(size, value) for size, value in zip(known, spec.shape, strict=True)]
        return self.shapes.tensor(sizes, spec.dtype, spec.device)

    def number(self, size: Any, value: int) -> Any:
        scalar = scalar_of(size)
        if scalar is None or not isinstance(scalar.node, fx.Node):
            return value
        if scalar.node not in self.symbols:
            self.symbols[scalar.node] = self.shapes.number(size, value)
        return self.symbols[scalar.node]

    def module(self, call: fx.Node) -> nn.Module:
        """Return a copy of a module of torch with parameters without data, and guard on its settings."""
        child, tracer = self.sizes.tracer.module.get_submodule(str(call.target)), self.sizes.tracer
        cls = type(child)
        shipped = (
            cls.__module__.startswith("torch.nn.modules.") and has_own_forward(cls) and "forward" not in vars(child)
        )
        if not shipped or child._modules or is_hooked(child):
            raise _Unknown
        for name, setting in vars(child).items():
            parts = setting if isinstance(setting, tuple) else (setting,)
            if not name.startswith("_") and name != "training":
                if not all(map(is_atom, parts)):
                    raise _Unknown
                self.sizes.setting(call, child, name)
        twin = copy.copy(child)
        for table in ("_parameters", "_buffers"):
            tensors = getattr(child, table).items()
            made = {
                name: tensor if tensor is None else self.argument(tracer.node_of(tensor)) for name, tensor in tensors
            }
            vars(twin)[table] = made
        return twin
