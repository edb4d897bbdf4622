"""Specialization: one graph of one module, with the conditions for running it in place of the forward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from schedule.capture.effects.effects import KIND, LENGTH, is_check, remove_dead
from schedule.capture.effects.later_reads import LATER, with_checks
from schedule.capture.effects.regions import REGION_FUNCTIONS, closing
from schedule.capture.graph.escaped_containers import CONTAINER, READ
from schedule.capture.graph.module_state import TRACING, attributes_unchanged
from schedule.capture.graph.signature import (
    Environment,
    Parameters,
    Signature,
    SignatureBuilder,
    bound_or_refused,
    fast_path_conditions,
    parameter_conditions,
)
from schedule.capture.guards.guard_set import GuardSet
from schedule.capture.recording.recording import Call, Recording
from schedule.capture.recording.structure import TensorSpec, leaves, original_class
from schedule.capture.specializing.conditions import conditions, kind_conditions
from schedule.capture.specializing.output_checks import insert_checks
from schedule.capture.specializing.rollback import directly, tried
from schedule.capture.tracing.graph_data import (
    check_spelling,
    has_constants,
    pack_graph,
    source_of,
    structural_key,
    unpack_graph,
)
from schedule.capture.tracing.results import Written
from schedule.capture.tracing.tracer import EnterChild, ModuleTracer
from schedule.util.errors import TraceError
from schedule.util.generated_code import generated
from schedule.util.generators import generators_restored


@dataclass(frozen=True)
class Inlined:
    """Properties required of a submodule inlined in a graph.

    Attributes:
        cls: its class.
        guard_set: guards on the state read by its forward.
        scheduled: whether the submodule is scheduled and the inlined graph is its scheduled graph.
        hooks_in: path of a module in the graph that runs its hooks; if "", it has none.
    """

    cls: type
    guard_set: GuardSet = field(default_factory=GuardSet)
    scheduled: bool = False
    hooks_in: str = ""


@dataclass(frozen=True)
class Specialization:
    """Traced forward of one module.

    Attributes:
        graph: the FX graph; treated as immutable once it is part of a specialization.
        signature: conditions on the arguments and the locations of the inputs.
        training: training flag of the module for which the graph was made.
        guards: further conditions, as Python source over ``self`` and the arguments.
        guard_set: guards on the Python state read by the forward.
        inlined: path of each inlined submodule → its required properties.
        call: the recorded call it was made from.
        returned: metadata of the forward's result.
        autocast: dtype of the autocast block for calls; None for no autocast.
    """

    graph: fx.Graph
    signature: Signature
    training: bool
    guards: tuple[str, ...]
    guard_set: GuardSet
    inlined: Mapping[str, Inlined]
    call: Call
    returned: Any = None
    autocast: torch.dtype | None = None

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The graph as a Python function of ``(module, *inputs)``, compiled on first access."""
        wrapper = closing if self.has_regions else lambda run: run
        run = tried(self.graph, lambda graph: wrapper(compiled(graph, checked=True)))
        return directly(self.graph, run, lambda graph: wrapper(compiled(graph)))

    def with_graph(self, graph: fx.Graph, inlined: Mapping[str, Inlined] | None = None) -> Specialization:
        """Return the same specialization with another graph, and add the submodules ``inlined`` in it."""
        return dataclasses.replace(self, graph=graph, inlined={**self.inlined, **(inlined or {})})

    @property
    def has_regions(self) -> bool:
        """Whether the graph has regions, such as ``no_grad`` or ``autocast`` blocks."""
        return any(node.target in REGION_FUNCTIONS for node in self.graph.nodes)

    @property
    def has_checks(self) -> bool:
        """Whether the graph contains checks, so it may fail while running."""
        return any(is_check(node.target) for node in self.graph.nodes)

    @property
    def is_portable(self) -> bool:
        """Whether another process can check the guards on Python state."""
        return self.guard_set.is_portable and all(each.guard_set.is_portable for each in self.inlined.values())

    def __getstate__(self) -> dict[str, Any]:
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**state, "graph": pack_graph(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "graph": unpack_graph(state["graph"])}.items():
            object.__setattr__(self, name, value)


_functions: weakref.WeakValueDictionary[Hashable, Callable[..., Any]] = weakref.WeakValueDictionary()


def compiled(graph: fx.Graph, checked: bool = False) -> Callable[..., Any]:
    """Compile ``graph`` to a Python function of ``(self, *inputs)``, with source for tracebacks.

    Equal graphs, such as those of like layers, share one function.

    Args:
        graph: the graph.
        checked: whether to check state that is read after other code has run; then ``self`` is the traced module.
    """
    key = _content(graph, checked)
    function = None if key is None else _functions.get(key)
    if function is None:
        with TRACING:  # writing the code changes how nodes are printed
            code = source_of(with_checks(graph) if checked else graph)
        function = generated(code.src, "forward", dict(code.globals), "schedule graph")
        if key is not None:
            _functions[key] = function
    return function


_PRINTED = (fx.Node, str, int, float, bool, type(None), slice, torch.dtype, torch.device)
"""Classes of arguments that a graph's code depends on by their ``repr`` alone."""


def _content(graph: fx.Graph, checked: bool) -> Hashable | None:
    """Return a key that equal graphs share, valid as long as their function exists, or None."""
    found: list[Hashable] = [checked]
    for node in graph.nodes:
        arguments = (node.args, node.kwargs)
        if not all(type(leaf) in _PRINTED for leaf in _leaves(arguments)):
            return None
        target = node.target if isinstance(node.target, str) else id(node.target)
        checks = tuple(map(node.meta.get, ("object", LATER, CONTAINER, READ, KIND, LENGTH))) if checked else None
        found.append((node.op, node.name, target, repr(arguments), checks))
    return tuple(found)


def _leaves(arguments: Any) -> list[Any]:
    leaves: list[Any] = []
    fx.node.map_aggregate(arguments, leaves.append)
    return leaves


def specialize(
    module: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    recording: Recording,
    training: bool,
    enter: EnterChild | None = None,
    autocast: torch.dtype | None = None,
) -> Specialization:
    """Return the specialization of ``forward`` of ``module`` for calls like ``call``.

    Like modules (:mod:`schedule.capture.tracing.graph_data`) are traced once and share the graph.

    Args:
        module: the module; unchanged afterwards.
        forward: its original, unbound forward.
        call: a recorded call, by metadata.
        recording: the run that ``call`` was recorded in.
        training: training flag to trace under, for the module and its submodules.
        enter: predicate for the submodules to inline; none if None.
        autocast: dtype of the autocast block for calls; None for no autocast.

    Raises:
        TraceError: the forward cannot be turned into a graph; the message has the line and the reason.
    """
    known: list[Specialization] = []
    if enter is None:
        known = recording.traced.setdefault(structural_key(module, call, forward, training, autocast), [])
    made = _holding(known, module, training)
    if made is None:
        made = _traced(module, forward, call, recording, training, enter or (lambda child, path: False), autocast)
        if enter is None and not has_constants(made):
            known.append(made)
    if autocast is None and forward is original_class(module).forward:
        recording.returned[module, training].append((call, made.returned))
    return made


def _holding(known: Sequence[Specialization], module: nn.Module, training: bool) -> Specialization | None:
    """Return a specialization of a like module valid for ``module`` too, or None."""
    if not known:
        return None
    with in_mode(module, training):
        return next((made for made in known if made.guard_set.holds(module)), None)


def _traced(
    module: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    recording: Recording,
    training: bool,
    enter: EnterChild,
    autocast: torch.dtype | None,
) -> Specialization:
    def attempt(**options: Any) -> tuple[Specialization, ModuleTracer]:
        tracer = ModuleTracer(module, recording, enter, use_recorded_outputs=autocast is None, **options)
        try:
            with TRACING, generators_restored(module), recording.as_after_run():
                return _traced_by(tracer, forward, call, training, autocast), tracer
        except TraceError:
            if not tracer.strings.written or "exact_strings" in options:
                raise
        return attempt(exact_strings=True, **options)

    made, tracer = attempt()
    for functions in tracer.index_functions.choices():
        with suppress(TraceError):  # what is made is good for fewer calls
            made, tracer = attempt(index_functions=functions)
            if not tracer.index_functions.refused:
                break
    return made


def _traced_by(
    tracer: ModuleTracer, forward: Callable[..., Any], call: Call, training: bool, autocast: torch.dtype | None
) -> Specialization:
    module, parameters = tracer.module, Parameters(forward)
    bound_or_refused(parameters, call, forward)
    environment = Environment.of(call, autocast)
    builder = SignatureBuilder(tracer.placeholder)
    args, kwargs = builder.build(parameters, call)
    tracer.arguments = builder
    tracer.evaluator.know_arguments((args, kwargs), builder.constants())
    with in_mode(module, training), environment.inlined(), attributes_unchanged(module):
        result = tracer.run(forward, (module, *args), kwargs)
        returned = tracer.described(result)
        assignments = tracer.evaluator.assignments
        writer = Written(tracer, result, *assignments.last(), returned=True)
        written = writer.of(result)
        assignments.complete(tracer.graph, writer.of)
    tracer.graph.output(written)
    builder.signature.conditions += environment.conditions(builder.signature)
    builder.signature.conditions += parameter_conditions(module, builder.signature)
    builder.signature.conditions += fast_path_conditions(module, forward)
    made = _finished(tracer, builder.signature, training, call, autocast)
    return dataclasses.replace(made, returned=returned)


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set the training flag of ``module`` and all its submodules for the block."""
    flags = [(child, child.training) for child in module.modules()]
    try:
        for child, _ in flags:
            child.training = training
        yield
    finally:
        for child, flag in flags:
            child.training = flag


def _finished(
    tracer: ModuleTracer,
    signature: Signature,
    training: bool,
    call: Call,
    autocast: torch.dtype | None,
) -> Specialization:
    graph = tracer.graph
    inputs = {node: signature.inputs[str(node.target)] for node in graph.nodes if node.op == "placeholder"}
    tracer.index_functions.remove_replaced()
    guards = conditions(tracer, inputs)
    signature.conditions += kind_conditions(tracer, inputs, signature)
    if any(map(_has_default_dtype, graph.nodes)):
        tracer.evaluator.query(torch.get_default_dtype, (), torch.get_default_dtype())
    remove_dead(graph)
    for node, text in inputs.items():
        if not node.users and not tracer.questions.concern(node):
            signature.kinds.pop(text, None)
        if tracer.questions.concern_layout(node):
            signature.conditions.append(f"{text}.layout is {signature.name(torch.strided, 'strided')}")
    tracer.strings.check(graph)
    check_spelling(graph)
    insert_checks(tracer.outputs)
    tracer.evaluator.later.write()
    graph.lint()
    inlined = {path: Inlined(original_class(child)) for path, child in tracer.inlined.items() if path}
    return Specialization(
        graph=graph,
        signature=signature,
        training=training,
        guards=tuple(guards),
        guard_set=tracer.evaluator.guard_set(),
        inlined=inlined,
        call=call,
        autocast=autocast,
    )


def _has_default_dtype(node: fx.Node) -> bool:
    """Check whether the dtype of a result is torch's default: it is floating-point, and no argument is."""
    own = [spec for _, spec in leaves(node.meta.get("spec")) if isinstance(spec, TensorSpec)]
    given = [leaf for each in node.all_input_nodes for _, leaf in leaves(each.meta.get("spec"))]
    if node.op not in ("call_function", "call_method") or not any(_is_inexact(spec) for spec in own):
        return False
    named = any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values()))
    return not named and not any(isinstance(spec, TensorSpec) and _is_inexact(spec) for spec in given)


def _is_inexact(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


__all__ = ["Specialization", "TraceError", "compiled", "original_class", "specialize"]
