"""Direct calls of layers of torch: they run no other code, so state is not checked behind them.

That may change at any time: by a hook, or by another module in place of a layer. So the layers are looked at before
each call, and handed to the graph, which need not look for them again::

    graph:     y = self.body.linear(x);                                    return y * 2
    compiled:  y = self.body.linear(x);  state_after_body_linear(self);    return y * 2
    directly:  y = body_linear.__call__(x);                                return y * 2

Memory allocated by a traced forward itself: in-place writes to it are invisible outside, and can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.tensor_kinds import storage_of
from fused.torch_internals.torch_modules import DropoutBase
from schedule.capture.effects.effects import runs_other_code
from schedule.capture.effects.later_reads import with_checks
from schedule.capture.guards.own_forward import CALL_NAMES, has_own_forward, methods_called
from schedule.capture.guards.resolution import found_in
from schedule.capture.recording.hooks import is_hooked
from schedule.capture.recording.structure import TensorSpec, leaves, tensors
from schedule.util.generated_code import generated

# -- Direct calls of layers of torch ------------------------------------------------------------------------


Run = Callable[..., Any]

_SHIPPED = {
    f"torch.nn.modules.{name}"
    for name in ("linear", "sparse", "conv", "normalization", "batchnorm", "instancenorm", "pooling", "activation")
}
LAYER = "layer"
"""Key of the metadata of calls of submodules: whether the module is such a layer, as seen in the trace."""
PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, DropoutBase)
"""Layers that may return their input."""
_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def is_layer(child: nn.Module) -> bool:
    """Check whether ``child`` is a layer of torch without hooks and submodules: a call runs only torch's own code."""
    methods = _methods(type(child))
    if not methods:
        return False
    own = vars(child)
    hooked = "forward" in own or "_schedule_state" in own or is_hooked(child)
    return not hooked and not own["_modules"] and all(map(_is_intact, methods))


def _is_intact(method: tuple[type, str, Any]) -> bool:
    cls, name, function = method
    return getattr(cls, name) is function or found_in(cls, name) is function  # in a trace, another stands for it


_methods_of: dict[type, tuple[tuple[type, str, Any], ...]] = {}


def _methods(cls: type) -> tuple[tuple[type, str, Any], ...]:
    """Return ``(cls, name, function)`` for each method of torch run by a call of a layer, or none for another class."""
    if cls not in _methods_of:
        known = cls.__module__ in _SHIPPED or cls in PASSING or cls.__module__ == DropoutBase.__module__
        if not known or not has_own_forward(cls):  # a method may be replaced only for now
            return ()
        names = (*CALL_NAMES, *methods_called(cls))
        _methods_of[cls] = tuple((cls, name, found_in(cls, name)) for name in names)
    return _methods_of[cls]


def is_plain(child: nn.Module) -> bool:
    """Check whether ``child`` is a layer of torch without effects, so it can be called again.

    Its output is new memory unless it passes its input on. A dropout is plain, and draws the same numbers again from
    the same state.
    """
    counting = getattr(child, "track_running_stats", False)
    return is_layer(child) and not counting and not isinstance(child, _RANDOM)


def writes_own(call: fx.Node) -> bool:
    """Check whether a layer was traced to change its input in place, made by the forward itself."""
    return call.meta.get("writes") is False


def calls_only_layers(graph: fx.Graph) -> bool:
    """Check whether ``graph`` runs no other code than calls of layers, as seen in its trace."""
    calls = [node for node in graph.nodes if runs_other_code(node)]
    return bool(calls) and all(node.op == "call_module" and node.meta.get(LAYER) for node in calls)


class DirectCalls:
    """Function of a graph with direct calls of its layers, as long as they run no other code.

    Args:
        graph: the graph.
        otherwise: function of the module and inputs for other calls, and under ``torch.compile``.
        compiled: function to compile a graph.
        is_quiet: function to check that a call of a module runs no other code, and can be made again if need be; it
            is also told whether the module may change its input in place.
    """

    def __init__(
        self,
        graph: fx.Graph,
        otherwise: Run,
        compiled: Callable[[fx.Graph], Run],
        is_quiet: Callable[[nn.Module, bool], bool],
    ) -> None:
        calls: dict[str, bool] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                calls[str(node.target)] = writes_own(node) and calls.get(str(node.target), True)
        owners = [_owner(node) for node in graph.nodes if _is_held(node)]
        paths = list(dict.fromkeys((*calls, *owners)))
        self._otherwise, self._is_quiet = otherwise, is_quiet
        self._modules, self._may_write = _finder(paths), tuple(calls.values())
        self._direct = cache(lambda: compiled(_handed(with_checks(graph, of_state=False), paths)))

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        """Run the graph."""
        modules = () if torch.compiler.is_compiling() else self._modules(module)
        if modules and all(map(self._is_quiet, modules, self._may_write)):  # the layers come first
            return self._direct()(module, *inputs, *modules)
        return self._otherwise(module, *inputs)


def _is_held(node: fx.Node) -> bool:
    """Check whether ``node`` reads a parameter or buffer of a submodule."""
    return node.op == "get_attr" and isinstance(node.meta.get("spec"), TensorSpec) and "." in str(node.target)


def _owner(node: fx.Node) -> str:
    return str(node.target).rpartition(".")[0]


def _finder(paths: Sequence[str]) -> Callable[[nn.Module], tuple[nn.Module, ...]]:
    """Return a function of a module for its submodules at ``paths``, or none if one is missing."""
    names, lines = {"": "self"}, list[str]()
    for path in paths:
        parts = path.split(".")
        for depth, part in enumerate(parts):
            owner, found = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
            if found not in names:
                names[found] = f"module_{len(names)}"
                lines.append(f"{names[found]} = {names[owner]}._modules[{part!r}]")
    result = "".join(f"{names[path]}, " for path in paths)
    body = "".join(f"        {line}\n" for line in (*lines, f"return ({result})"))
    source = f"def find(self):\n    try:\n{body}    except (KeyError, AttributeError):\n        return ()\n"
    return generated(source, "find", {}, "schedule layers")


def _handed(graph: fx.Graph, paths: Sequence[str]) -> fx.Graph:
    """Return a copy of ``graph`` with the modules at ``paths`` as further inputs."""
    written = fx.Graph()
    copies = {node: written.node_copy(node) for node in graph.nodes if node.op == "placeholder"}
    modules = {path: written.placeholder(name) for path, name in _argument_names(graph, paths).items()}
    for node in graph.nodes:
        if node in copies:
            continue
        copy = copies[node] = written.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            copy.op, copy.target, copy.args = "call_method", "__call__", (modules[str(node.target)], *copy.args)
        elif _is_held(node):
            owner, _, name = str(node.target).rpartition(".")
            copy.op, copy.target, copy.args = "call_function", getattr, (modules[owner], name)
    return written


def _argument_names(graph: fx.Graph, paths: Sequence[str]) -> dict[str, str]:
    """Return a name for each module, for tracebacks."""
    taken = {name for node in graph.nodes for name in (node.name, str(node.target))}
    names: dict[str, str] = {}
    for path in paths:
        name = "module_" + "".join(char if char.isascii() and char.isalnum() else "_" for char in path)
        while name in taken:
            name += "_"
        taken.add(name)
        names[path] = name
    return names


# -- Memory allocated by a traced forward itself ------------------------------------------------------------


SHARES = "shares"
"""Key of the metadata of calls: whether the result may share memory with an argument, as seen in the trace."""

_MAY_RETURN_ITS_INPUT = {
    "contiguous", "reshape", "reshape_as", "flatten", "ravel", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_alpha_dropout", "asarray", "as_tensor",
}  # fmt: skip


class Memory:
    """Storages allocated by torch functions and layers for their results during a trace.

    Views share the storage of their base, also without data. A result that may be its argument, depending on strides
    not known beforehand, does not count as new.
    """

    def __init__(self) -> None:
        self._new: dict[int, torch.UntypedStorage] = {}

    def computed(self, func: Any, value: Any, arguments: Any) -> bool:
        """Record the memory of ``value`` returned by ``func`` as new, and return whether it shares that of an argument.

        All tensors are data-free, those of parameters and buffers too. A result that may be its argument is not new.
        """
        with DisableTorchFunction():
            given = [leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
            if getattr(func, "__name__", "") in _MAY_RETURN_ITS_INPUT and not all(map(self.is_new, given)):
                return True
            theirs = set(map(storage_of, given))
            new = [tensor for tensor in tensors(value) if storage_of(tensor) not in theirs]
            self._keep(new)
            return len(new) < len(list(tensors(value)))

    def called(self, child: nn.Module, value: Any, arguments: Any) -> None:
        """Record the memory of ``value`` returned by ``child`` as new, if a plain layer allocated it."""
        passing = isinstance(child, PASSING) or getattr(child, "inplace", False)
        if is_plain(child) and (not passing or self.all_new(arguments)):
            with DisableTorchFunction():
                self._keep(tensors(value))

    def _keep(self, made: Any) -> None:
        for tensor in made:
            self._new[storage_of(tensor)] = tensor.untyped_storage()

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Check whether no code outside the forward can hold ``tensor`` or a view of it."""
        with DisableTorchFunction():
            return storage_of(tensor) in self._new

    def all_new(self, arguments: Any) -> bool:
        """Check whether this holds for all tensors in ``arguments``."""
        return all(self.is_new(leaf) for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
