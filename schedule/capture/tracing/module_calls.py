"""Calls of submodules from a traced forward: written as nodes, or traced themselves if the submodule is inlined."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import fx, nn

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.tensor_kinds import storage_of
from fused.torch_internals.torch_modules import MODULE_CALLS, DropoutBase
from schedule.capture.effects import torch_calls as metadata
from schedule.capture.effects.effects import KIND
from schedule.capture.effects.layers import LAYER, Memory, is_layer, is_plain
from schedule.capture.graph.module_state import attributes, attributes_as
from schedule.capture.graph.output_structure import structure
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.guards.own_forward import CALL_NAMES
from schedule.capture.python.evaluator import Evaluator
from schedule.capture.recording.hooks import collecting_hooks, is_hooked, nothing_collected
from schedule.capture.recording.structure import map_structure, original_class, tensors
from schedule.capture.recording.user_lines import data_dependent, user_line
from schedule.capture.tracing.graph_data import comparable
from schedule.capture.tracing.results import watch_returned
from schedule.util.errors import TraceError

EnterChild = Callable[[nn.Module, str], bool]


class _Tracer(Trace, Protocol):
    evaluator: Evaluator
    memory: Memory


class ModuleCalls:
    """Calls of modules during one trace.

    Args:
        tracer: the tracer.
        enter: whether to inline a submodule (given the module and its path) instead of writing a call.
        use_recorded_outputs: whether outputs of submodules in the recorded run are valid here too.
    """

    def __init__(self, tracer: _Tracer, enter: EnterChild, use_recorded_outputs: bool) -> None:
        self.tracer, self._is_inlined, self._use_recorded_outputs = tracer, enter, use_recorded_outputs
        self._within = [tracer.module]

    @property
    def module(self) -> nn.Module:
        """The module with the forward being traced: the root, or the innermost inlined submodule."""
        return self._within[-1]

    def call(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module from the forward: write a node, or trace the call if the module is inlined."""
        own = self.tracer.path_of(child)
        if own is None:
            self.tracer.evaluator.read_untouched(child)
            return self._enter(child, *args, **kwargs)  # held by something else than a module, or made by the forward
        path = self.tracer.evaluator.path_of(child) or own
        call = functools.partial(self._enter, child)
        if self.tracer.inside_child or child is self.tracer.module or self._is_inlined(child, path):
            if not self.tracer.inside_child:
                self.tracer.inlined[path] = child
            self._within.append(child)
            try:
                return call(*args, **kwargs)
            finally:
                self._within.pop()
        if child not in self.tracer.recording.assumed:
            self.tracer.evaluator.read_kind(child)
        with self.tracer.evaluator.recording(False):
            value, hooks = self._called(child, path, call, args, kwargs), self._collecting(child, path)
        for hook in hooks:
            hook(child, args, value)
        return value

    def traces_into(self, path: str) -> bool:
        """Check whether calls of the submodule at ``path`` are inlined, and those of the modules around it."""
        names, root, inlined = path.split(".") if path else [], self.tracer.module, self.tracer.inlined
        for depth in range(len(names), 0, -1):
            one = ".".join(names[:depth])
            if one in inlined:
                return True
            module = root.get_submodule(one)
            if type(module).forward is not nn.Module.forward and not self._is_inlined(module, one):
                return False
        return True

    def on_native_call(
        self, child: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Handle a call of a module by code outside the evaluator."""
        return call(*args, **kwargs) if self.tracer.inside_child else self.call(child, args, kwargs)

    def _enter(self, child: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``child(*args, **kwargs)`` and trace it."""
        for name in CALL_NAMES:
            caller = self.tracer.evaluator.resolve(original_class(child), name)
            if caller not in MODULE_CALLS:  # of the class, or torch's own was replaced
                return self.tracer.evaluator.call(caller, child, *args, **kwargs)
        return self.forward(child, args, kwargs)

    def forward(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the work of ``nn.Module.__call__``: run the forward and transformers' output-collecting hooks."""
        own = "forward" in vars(child)
        if is_hooked(child) or type(child) is not original_class(child) or (own and self.tracer.inside_child):
            return child(*args, **kwargs)
        forward = vars(child)["forward"] if own else type(child).forward
        value = self.tracer.evaluator.call(forward, *(() if own else (child,)), *args, **kwargs)
        for hook in collecting_hooks(child):
            hook(child, args, value)
        return value

    def _called(
        self, child: nn.Module, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Write the call of ``child`` as a node, and return its tracked output."""
        with DisableTorchFunction():
            node = self._call_module(path, *self.tracer.handed(args, kwargs))
            self.tracer.containers.note((args, kwargs), node)
            node.meta["source"] = user_line()
            node.meta["draws"] = isinstance(child, DropoutBase)
            node.meta[LAYER] = is_layer(child)
            described = self._recorded_output(child, args, kwargs)
            if described is not None:
                value = self.tracer.recording.materialize(described)
            else:
                value = self._run_child(child, call, args, kwargs)
            given = map_structure((args, kwargs), self.tracer.value_of)
            if child in self.tracer.recording.changing or getattr(child, "inplace", False):
                node.meta["writes"] = not (is_plain(child) and self.tracer.memory.all_new(given))
            if value is None:
                node.meta[KIND] = ()
            value = self.tracer.track(value, node)
            # A hook may decide on the dtype, whatever the child computes in.
            self.tracer.outputs[node] = structure(value, dtypes=child in self.tracer.recording.assumed)
            self.tracer.memory.called(child, value, given)
        for container in watch_returned(self.tracer, value, node):
            self.tracer.evaluator.know_returned(container)
        return value

    def _collecting(self, child: nn.Module, path: str) -> list[Callable[..., Any]]:
        """Return transformers' hooks on ``child`` to collect its output for the traced forward."""
        for below in child.modules():
            if below is not child and collecting_hooks(below):
                raise TraceError(
                    f"the forward collects outputs of modules inside {path}, which is a call of the graph",
                    where=user_line(),
                    fix="trace with flatten=True, or without hidden states and attentions in the example inputs",
                )
        return collecting_hooks(child)

    def _call_module(self, path: str, args: Any, kwargs: Any) -> fx.Node:
        name = path.replace(".", "_")
        name = "self_module" if name == "self" else name  # `self` is the root in generated code
        return self.tracer.graph.create_node("call_module", path, args, kwargs, name=name)

    def _recorded_output(self, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if child in self.tracer.recording.assumed:
            return self.tracer.recording.assumed[child]
        calls = self.tracer.recording.calls.get(child, ()) if self._use_recorded_outputs else ()
        if not calls:
            return None
        received = comparable(map_structure((args, kwargs), self.tracer.value_of))
        for call in calls:
            if comparable((call.args, call.kwargs)) == received:
                traced = self.tracer.recording.returned.get((child, child.training), ())
                return next((returned for other, returned in traced if other is call), call.output)
        return None

    def _run_child(
        self, child: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the child on data-free tensors without writing nodes."""
        real_args, real_kwargs = map_structure((tuple(args), kwargs), self.tracer.value_of)
        self.tracer.inside_child = True
        mode = self.tracer.recording.fake_mode
        mode.observe()
        try:
            with mode, nothing_collected(), attributes_as(attributes(child)):
                value = call(*real_args, **real_kwargs)
            if any(storage_of(tensor) in mode.written for tensor in tensors((real_args, real_kwargs))):
                self.tracer.recording.changing.add(child)
            return value
        except metadata.DATA_DEPENDENT as error:
            raise data_dependent(call) from error
        finally:
            self.tracer.inside_child = False
