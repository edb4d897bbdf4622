"""Tracer of one module: its forward runs on data-free tensors and is written as an FX graph.

Every torch call of the forward is passed to :meth:`ModuleTracer.__torch_function__`. The tensors are real
``torch.Tensor`` objects without data, so Python code that tests types, shapes, dtypes or ``None`` just works;
sizes are symbolic (:mod:`schedule.capture.graph.scalars`). Calls of submodules are written as ``call_module`` nodes
unless the submodules are inlined (flattened). Parameters and buffers become ``get_attr`` nodes.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.tensor_kinds import failures_unlogged
from schedule.capture.effects import torch_calls as metadata
from schedule.capture.effects.autograd_functions import FunctionTracker
from schedule.capture.effects.layers import SHARES, Memory
from schedule.capture.effects.opaque import OpaqueTracker, untracked
from schedule.capture.effects.regions import RegionTracker
from schedule.capture.effects.result_kinds import PROPERTIES, Questions, is_of_object
from schedule.capture.effects.torch_calls import guard_number, meta_kernel
from schedule.capture.effects.writes import known_truth, requires_grad, written_tensors
from schedule.capture.graph.escaped_containers import HandedContainers
from schedule.capture.graph.output_structure import Expected
from schedule.capture.graph.scalars import scalar_of, symbolic
from schedule.capture.graph.signature import SignatureBuilder
from schedule.capture.graph.string_formatting import Strings
from schedule.capture.guards.plain_values import is_atom
from schedule.capture.guards.sources import Const, Self
from schedule.capture.python.evaluator import Evaluator
from schedule.capture.python.index_functions import CodeType, IndexFunctions
from schedule.capture.python.native_handlers import HANDLERS, seeding_handlers
from schedule.capture.recording.data_dependence import NUMBERS, Replay, expected, writes_number
from schedule.capture.recording.hooks import nothing_collected
from schedule.capture.recording.interception import intercepted_calls
from schedule.capture.recording.recording import Recording
from schedule.capture.recording.structure import (
    TensorSpec,
    attributes_beside,
    is_plain_dataclass,
    is_plain_mapping,
    leaves,
    map_fields,
    map_structure,
    rebuilt_mapping,
)
from schedule.capture.recording.user_lines import data_dependent, outermost, raised, user_line
from schedule.capture.shapes.symbolic_sizes import SizeReader
from schedule.capture.tracing.module_calls import EnterChild, ModuleCalls
from schedule.capture.tracing.results import Written
from schedule.capture.tracing.state_nodes import StateNodes
from schedule.util.internal_errors import perform
from schedule.util.user_code import UserCodeError, user_code


class ModuleTracer(TorchFunctionMode):
    """Tracer of one module, for a single use.

    Args:
        module: the module to trace.
        recording: the recorded run, source of the outputs of submodule calls.
        enter: whether to inline a submodule (given the module and its path) instead of writing a call.
        use_recorded_outputs: whether outputs of submodules in the recorded run are valid here too; if not, the
            submodules are run on data-free tensors.
        exact_strings: whether formatting a size in a string adds a guard on it.
        index_functions: code of the functions of indices to write as calls.
    """

    def __init__(
        self,
        module: nn.Module,
        recording: Recording,
        enter: EnterChild,
        use_recorded_outputs: bool = True,
        exact_strings: bool = False,
        index_functions: frozenset[CodeType] = frozenset(),
    ) -> None:
        super().__init__()
        self.strings, self.containers, self.questions = Strings(exact_strings), HandedContainers(), Questions()
        self.index_functions = IndexFunctions(self, index_functions)
        self.module, self.recording = module, recording
        self.graph = fx.Graph()
        self.guards: dict[fx.Node, Any] = {}
        self.inlined: dict[str, nn.Module] = {}
        self.outputs: dict[fx.Node, Expected] = {}
        self.arguments: SignatureBuilder | None = None
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._requires_grad: dict[fx.Node, bool] = {}
        self._devices: dict[int, tuple[torch.device, fx.Node]] = {}
        self._module_paths = {child: name for name, child in module.named_modules()}
        self._data_free: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.inside_child = False
        self._replay = Replay()
        self.memory = Memory()
        self.sizes = SizeReader(self)
        self.opaque = OpaqueTracker(self)
        self.regions = RegionTracker(self)
        self.functions = FunctionTracker(self)
        self.evaluator = Evaluator(self, HANDLERS | seeding_handlers())
        self.calls = ModuleCalls(self, enter, use_recorded_outputs)
        self.state = StateNodes(self)

    # -- running ---------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``forward`` under the tracer and return its result in tracked values."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.recording.grad_enabled))
            stack.enter_context(intercepted_calls(self.module, self.calls.on_native_call))
            stack.enter_context(nothing_collected())
            stack.enter_context(self)
            try:
                with failures_unlogged(), user_code():
                    return outermost(self.evaluator.run, (forward, *args), kwargs)
            except UserCodeError as failed:
                raise raised(failed.error) from failed.error

    def placeholder(self, name: str, described: Any) -> Any:
        """Return a tracked input: a data-free tensor, a symbolic number, or a watched opaque object."""
        node = self.graph.placeholder(name)
        self._requires_grad[node] = isinstance(described, TensorSpec) and described.requires_grad
        return self.track(self.recording.materialize(described), node)

    def described(self, value: Any) -> Any:
        """Return the metadata of ``value``, returned by the forward."""
        with DisableTorchFunction():
            return self.recording.describe(map_structure(value, self.value_of))

    # -- values and nodes ------------------------------------------------------------------------------

    def track(self, value: Any, node: fx.Node) -> Any:
        """Record ``node`` as the node of ``value``, and return the tracked value to use from here on."""
        node.meta.setdefault("spec", self._spec(value))
        if isinstance(value, torch.Tensor):
            if id(value) in self._nodes and self._nodes[id(value)][1] is not node:
                with self.recording.fake_mode:
                    value = value.detach()  # the same object came back: a second name must not rename the first
            self._nodes[id(value)] = (value, node)
            return value
        if isinstance(value, enum.Enum):  # before numbers, tuples and others that its members may be too
            return self.opaque.watch(value, node)
        if isinstance(value, (bool, int, float)):
            return symbolic(self, node, value)
        if isinstance(value, (list, tuple)) or is_plain_mapping(value):
            return self._track_items(value, node)
        if is_plain_dataclass(value) and not is_of_object(node):
            return map_fields(value, lambda name, item: self.track(item, self.emit(getattr, (node, name))))
        if value is None or type(value) is str or isinstance(value, torch.dtype):
            self.ask(node, *PROPERTIES)
            return value
        if isinstance(value, torch.device):
            self._devices[id(value)] = (value, node)
            return value
        return self.opaque.watch(value, node)

    def _track_items(self, value: Any, node: fx.Node) -> Any:
        if isinstance(value, dict):
            items = {k: self.track(v, self.emit(operator.getitem, (node, k))) for k, v in value.items()}
            beside = attributes_beside(value)
            attributes = {name: self.track(each, self.emit(getattr, (node, name))) for name, each in beside.items()}
            return rebuilt_mapping(type(value), items, attributes)
        self.ask(node, "rank")  # which their number may depend on
        tracked = [self.track(item, self.emit(operator.getitem, (node, i))) for i, item in enumerate(value)]
        if isinstance(value, list):
            return tracked
        if hasattr(value, "_fields"):
            return type(value)(*tracked)
        return tuple(tracked) if type(value) is tuple else type(value)(tracked)

    def _spec(self, value: Any) -> Any:
        def of_leaf(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return TensorSpec.of(leaf)
            return leaf if isinstance(leaf, (bool, int, float, str, type(None), torch.dtype)) else type(leaf)

        return map_structure(value, of_leaf)

    def emit(self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """Write a ``call_function`` node, or a ``call_method`` node if ``target`` is a name."""
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args, kwargs or {})
        node.meta["source"] = user_line()
        if self.calls.module is not self.module:
            node.meta["module"] = self._module_paths.get(self.calls.module, "")
        return node

    def emit_scalar(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> fx.Node:
        """Write a node of arithmetic on sizes."""
        node = self.emit(function, operands)
        node.meta["spec"] = value
        return node

    def guard(self, node: fx.Node, value: Any) -> None:
        """Guard on ``node`` computing ``value``."""
        self.guards.setdefault(node, value)

    def ask(self, value: Any, *asked: str) -> None:
        """Note that the forward asks for the dtype, rank or device of ``value``, or whether it is a tensor.

        Args:
            value: a tensor, a symbolic number, or its node.
            asked: what of :data:`~schedule.capture.effects.result_kinds.PROPERTIES` it asks for.
        """
        if isinstance(value, fx.Node):
            self.questions.about(value, asked)
        elif (scalar := scalar_of(value)) is not None:
            self.questions.about(scalar.node, asked)
        elif id(value) in self._nodes:
            self.questions.about(self._nodes[id(value)][1], asked)

    def node_of(self, leaf: Any) -> Any:
        """Return the node of ``leaf``, or the constant itself."""
        if isinstance(leaf, torch.Tensor):
            return self._tensor_node(leaf)
        scalar = scalar_of(leaf)
        if scalar is not None:
            return scalar.node
        if isinstance(leaf, torch.device) and id(leaf) in self._devices:
            return self._devices[id(leaf)][1]
        return self.state.object(leaf) or self.opaque.node_of(leaf)

    def path_of(self, module: nn.Module) -> str | None:
        """Return the path of ``module`` in the traced module, or None if it is not part of it."""
        return self._module_paths.get(module)

    def container_input(self, value: Any) -> fx.Node | None:
        """Return a node for a container among the arguments or in an object there, or None for any other value."""
        node = self.opaque.containers.node_of(value)
        return node if node or self.arguments is None else self.arguments.container_input(value, self.graph)

    def outside_container(self, value: Any, required: bool) -> fx.Node | None:
        """Return the node of a container that the forward did not make, or None.

        Raises:
            TraceError: it has no node, and is ``required`` to.
        """
        if not self.evaluator.is_outside(value):
            return None
        node = self.state.object(value)
        if node is None and required:
            raise self.evaluator.refused(f"the forward returns a {type(value).__name__} that it did not make")
        return node

    def is_outside(self, value: Any) -> bool:
        """Check whether the forward did not make ``value``, an object."""
        given = self.arguments is not None and self.arguments.is_given(value)
        own = isinstance(value, nn.Module) and self.path_of(value) is not None
        return given or own or self.evaluator.is_outside(value)

    @property
    def last_call(self) -> fx.Node | None:
        """The last node that runs other code, or begins or ends a region behind such a node; None for none."""
        return self.evaluator.later.call

    def know_constant(self, value: Any) -> None:
        """Guard on what a function or method reads that is the same object at each call, such as its closure."""
        self.evaluator.know_arguments((), (value,))

    def refuse_writes(self, value: Any) -> None:
        """Refuse that the forward changes the containers in ``value``, found in an argument."""
        self.evaluator.know_arguments(value, ())

    def guard_lacks(self, value: Any, name: str) -> None:
        """Guard on ``value`` having no attribute ``name``, if it is a dataclass among the arguments."""
        if self.arguments is not None:
            self.arguments.lacks(value, name)

    def guard_identity(self, value: Any) -> None:
        """Guard on ``value`` being the same object at each call, if it was read from outside."""
        source = self.evaluator.found_at(value)
        if source is not None and not is_atom(value) and not isinstance(source, (Const, Self)):
            with self.evaluator.recording(True):
                self.evaluator.guard("is", source, value)

    def _tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) in self._nodes:
            node = self._nodes[id(tensor)][1]
        else:
            node = self.state.tensor(tensor)
            self._nodes[id(tensor)], self._requires_grad[node] = (tensor, node), tensor.requires_grad
        self.state.check_tensor(tensor, node)
        return node

    def as_nodes(self, value: Any) -> Any:
        """Return arguments with tracked values replaced by their nodes."""
        return map_structure(value, self.node_of)

    def handed(self, *values: Any) -> tuple[Any, ...]:
        """Return arguments of code outside the graph in nodes: they keep their classes, and containers are shared."""
        written = Written(self, *values, returned=False)
        return tuple(map(written.of, values))

    def value_of(self, leaf: Any) -> Any:
        """Return the value of a leaf for evaluation: a data-free tensor, a plain number or the object itself."""
        if isinstance(leaf, torch.Tensor):
            return self.data_free(leaf)
        scalar = scalar_of(leaf)
        return untracked(leaf) if scalar is None else scalar.value

    def data_free(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a data-free placeholder for a parameter or buffer, or any other tracked tensor as it is."""
        if id(tensor) in self._nodes and not self.state.holds(tensor):
            return tensor
        if id(tensor) not in self._data_free:
            with self.recording.fake_mode:
                meta_kernel = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            self._data_free[id(tensor)] = (tensor, meta_kernel)
        return self._data_free[id(tensor)][1]

    # -- torch calls -----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if metadata.attribute_name(func) in metadata.AUTOGRAD_STATE:
            raise self.evaluator.refused(f"the forward asks for .{metadata.attribute_name(func)} of a tensor")
        if func.__name__ == "__set__":
            if func.__self__.__name__ == "requires_grad":
                return self.__torch_function__(torch.Tensor.requires_grad_, types, args)
            raise self.evaluator.refused(f"the forward sets .{func.__self__.__name__} of a tensor")
        if metadata.is_constant_query(func):
            return self._constant_query(func, args, kwargs)
        if self.regions.handles(func):
            return self.regions.on_call(func, args)
        self.index_functions.notice(func, args)
        if func in (torch.Tensor.__format__, torch.Tensor.__repr__):
            number = self.__torch_function__(torch.Tensor.item, (), args[:1]) if writes_number(func, args) else None
            return self.strings.of_tensor(number, *args[1:])
        answer = self.sizes.handles(func, args, kwargs)
        if answer is not None:
            return answer()
        target, operands = metadata.written_call(func, tuple(args), kwargs)
        node = self.emit(target, self.as_nodes(operands), self.as_nodes(kwargs))
        known = known_truth(node) if func is torch.Tensor.__bool__ else None
        if known is not None:
            self.graph.erase_node(node)
            return known
        operand_values = map_structure((tuple(args), kwargs), self.value_of)
        value = self._evaluate(func, operand_values, node)
        if value is NotImplemented:  # a comparison with a string or another object
            self.graph.erase_node(node)
            return value
        if func.__name__ in NUMBERS and metadata.is_method(func):
            node.meta["spec"] = value
            self.guard(node, value)
            return value
        guard_number(self.sizes.shape, func, args, kwargs)
        written = written_tensors(self, node, (args, kwargs))
        if written:
            node.meta["local"] = all(self.memory.is_new(self.value_of(tensor)) for tensor in written)
        for tensor in written:
            if value is self.value_of(tensor):
                node.meta["spec"] = TensorSpec.of(value)
                self._nodes[id(tensor)] = (tensor, node)
                return tensor
        node.meta[SHARES] = self.memory.computed(func, value, operand_values)
        return self.track(value, node)

    def _constant_query(self, func: Any, args: Any, kwargs: Any) -> Any:
        asked = metadata.asked_by(func)
        for _, leaf in leaves((args, kwargs)):
            self.ask(leaf, *asked)
            if "dtype" in asked:
                self.guard_dtype(leaf)
        return perform(func, *args, **kwargs)

    def guard_dtype(self, tensor: torch.Tensor) -> None:
        """Guard on the dtype of ``tensor``, a parameter or buffer."""
        if self.state.holds(tensor) and not self.evaluator.has_read(tensor):
            node = self.emit(getattr, (self._tensor_node(tensor), "dtype"))
            node.meta["spec"] = tensor.dtype
            self.guard(node, tensor.dtype)

    def _evaluate(self, func: Any, operands: tuple[Any, Any], node: fx.Node) -> Any:
        if metadata.is_attribute(func, "requires_grad"):
            return requires_grad(node.args[0], self._requires_grad, torch.is_grad_enabled())
        args, kwargs = operands
        self.recording.fake_mode.observe()
        try:
            with self.recording.fake_mode:
                return perform(meta_kernel(func), *args, **kwargs)
        except metadata.DATA_DEPENDENT as error:
            for seen in self._replay.next(self.recording.seen.get(self.calls.module), func):
                return self.recording.materialize(seen)
            if func is torch.Tensor.__bool__ and (finite := expected(node)) is not None:
                return finite
            raise data_dependent(func) from error
