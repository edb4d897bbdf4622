"""Conversion of guards found while tracing to conditions checked before a graph runs.

A guard says: the graph is valid only if this node computes the recorded value. If the node depends only on sizes of
inputs, parameters and plain numbers, the guard becomes a Python condition on the arguments. Otherwise a check is
inserted in the graph, allowed only before any effect that cannot be undone. When it fails, the states of random
generators and caches are restored (:mod:`schedule.capture.specializing.rollback`).
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from schedule.capture.effects.effects import (
    ASSUMED,
    IS_PLAIN,
    KIND,
    changes_object,
    graph_check,
    has_effect,
    runs_other_code,
)
from schedule.capture.effects.later_reads import AGAIN, check_same
from schedule.capture.effects.object_containers import assume
from schedule.capture.effects.opaque import Constant, is_object
from schedule.capture.effects.replaying_calls import Made
from schedule.capture.effects.restoring import first_lasting
from schedule.capture.effects.result_kinds import is_kind, is_result
from schedule.capture.graph.scalars import scalar_of
from schedule.capture.graph.signature import Signature
from schedule.capture.guards.plain_values import equal, has_sign_of_zero
from schedule.capture.recording.structure import literal, member_source
from schedule.capture.shapes.size_rules import size_read
from schedule.capture.tracing.tracer import ModuleTracer
from schedule.util.errors import ScheduleError, TraceError
from schedule.util.nodes import last_node

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "&",
    operator.or_: "|",
    operator.is_: "is",
}
_QUESTIONS: dict[Any, str] = {operator.truth: "bool({0})", len: "len({0})", operator.contains: "({1} in {0})"}
_QUESTIONS |= {hasattr: "hasattr({0}, {1})", tuple: "tuple({0})"}
_QUESTIONS |= {question: f"type({{0}}) is {cls.__name__}" for cls, question in IS_PLAIN.items()}
_PURE_CALLS = {"min": min, "max": max, "float": float, "int": int, "abs": abs, "round": round}


class GuardMiss(Exception):
    """Failure of a check inside a graph. The caller runs the original forward.

    Attributes:
        made: calls of submodules not to be repeated by the original forward.
    """

    made: tuple[Made, ...] = ()


@graph_check
def check(value: Any, expected: Any, condition: str) -> None:
    """Raise :class:`GuardMiss` unless ``value`` is the same as in the recorded run."""
    if _differs(value, expected):
        raise GuardMiss(f"{condition} is {value}, was {expected}")


@graph_check
def check_still(value: Any, expected: Any, what: str) -> None:
    """Raise unless ``value``, computed from state after other code has run, is what it was before the graph ran.

    Raises:
        ScheduleError: code that the graph called has changed it.
    """
    if _differs(value, expected):
        raise ScheduleError(
            f"{what} is {value}, but was {expected} when the call began: code that the forward calls has changed it, "
            "which it did not in the recorded call",
            fix="undo the schedule of this module, or schedule the model anew with a call in which it changes",
        )


def _differs(value: Any, expected: Any) -> bool:
    """Compare plain values by class too, and functions, enums and other objects by identity.

    Symbolic booleans, under ``torch.compile``, do not support ``!=``.
    """
    if is_object(expected):
        return bool(value != expected) if type(expected) in _METHODS else value is not expected
    if type(value) in _PLAIN and type(expected) in _PLAIN and type(value) is not type(expected):
        return True
    if isinstance(expected, bool):
        return bool(value) is not expected
    if type(expected) is tuple:
        return type(value) is not tuple or len(value) != len(expected) or any(map(_differs, value, expected))
    return not equal(value, expected)


_PLAIN = (bool, int, float, str, type(None))
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
"""Classes of objects that Python makes at each access, and compares by what they are bound to."""


_OF_ATTRIBUTES = (getattr, hasattr)


class NotBeforehand(Exception):
    """Value only known while the graph runs."""


def expression(node: Any, inputs: dict[fx.Node, str], tracer: ModuleTracer) -> str:
    """Return Python source to compute ``node`` from ``self`` and the arguments.

    Args:
        node: a graph node or a constant.
        inputs: the source of each placeholder.
        tracer: the tracer, to trace sizes back to inputs.

    Raises:
        NotBeforehand: it depends on more than sizes and numbers.
    """
    if not isinstance(node, fx.Node):
        return literal(node)
    if node in inputs:
        return inputs[node]
    if node.op == "get_attr":
        return functools.reduce(member_source, str(node.target).split("."), "self")
    asks_object = bool(node.meta.get("opaque")) and not changes_object(node)
    if node.op == "call_method" and (node.target == "numel" or (asks_object and not _changed_before(node))):
        parts = [expression(arg, inputs, tracer) for arg in node.args]
        return f"{parts[0]}.{node.target}({', '.join(parts[1:])})"
    if node.op != "call_function":
        raise NotBeforehand(node.name)
    asks = node.target in _QUESTIONS and bool(node.meta.get("opaque"))
    if (asks and changes_object(node)) or ((asks or node.target is getattr) and _changed_before(node)):
        raise NotBeforehand(node.name)
    if asks:
        return _QUESTIONS[node.target].format(*(expression(arg, inputs, tracer) for arg in node.args))
    if (read := size_read(node)) is not None and read[0].op not in ("placeholder", "get_attr"):
        return _size_expression(node, read, inputs, tracer)
    return _call_expression(node, [expression(arg, inputs, tracer) for arg in node.args])


def _size_expression(node: fx.Node, read: tuple[fx.Node, int], inputs: dict[fx.Node, str], tracer: ModuleTracer) -> str:
    size = tracer.sizes.assumed(*read, node.meta["spec"])
    if size is None:
        raise NotBeforehand(node.name)
    scalar = scalar_of(size)
    return repr(size) if scalar is None else expression(scalar.node, inputs, tracer)


def _changed_before(question: fx.Node) -> bool:
    """Check whether the graph changes the object read by ``question``, or a part of it, before it is read."""
    asked = _location(question if question.target in _OF_ATTRIBUTES else question.args[0])
    for node in question.graph.nodes:
        if node is question:
            return False
        if has_effect(node) and any(
            _overlap(asked, _location(n)) for n in node.all_input_nodes if n.meta.get("object")
        ):
            return True
    return False


def _location(value: Any) -> tuple[Any, ...]:
    """Return the location of an object: its input or call, then the attribute names."""
    if isinstance(value, fx.Node) and value.target in _OF_ATTRIBUTES:
        return (*_location(value.args[0]), value.args[1])
    return (value,)


def _overlap(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(x == y for x, y in zip(a, b, strict=False))


def _call_expression(node: fx.Node, parts: list[str]) -> str:
    if node.target is getattr:
        return f"{parts[0]}.{node.args[1]}"
    if node.target is operator.getitem and isinstance(node.args[1], (int, str)):
        return f"{parts[0]}[{parts[1]}]"
    if node.target in _INFIX:
        return f"({parts[0]} {_INFIX[node.target]} {parts[1]})"
    if node.target is operator.neg:
        return f"(-{parts[0]})"
    if node.target is operator.not_:
        return f"(not {parts[0]})"
    name = getattr(node.target, "__name__", "")
    if _PURE_CALLS.get(name) is node.target:
        return f"{name}({', '.join(parts)})"
    raise NotBeforehand(node.name)


def conditions(tracer: ModuleTracer, inputs: dict[fx.Node, str]) -> list[str]:
    """Return Python conditions for the tracer's guards, and insert checks for guards only known at run time."""
    graph, found, done = tracer.graph, [], set()
    output, lasting = last_node(graph), first_lasting(graph)
    other_code = next(filter(runs_other_code, graph.nodes), output)
    with graph.inserting_before(output):
        for number in tracer.questions.numbers:
            _guard_numbers(number, tracer)
        while pending := [node for node in tracer.guards if node not in done]:
            for node in pending:  # tracing sizes back may add guards
                done.add(node)
                _guard_numbers(node, tracer)
                text = _condition_text(node, inputs, tracer, lasting)
                if text is None:
                    _insert_check(graph, node, tracer.guards[node], lasting)
                    continue
                found.append(_condition(text, tracer.guards[node], _is_read(node)))
                if other_code < node and _reads_state(node):
                    _insert(graph, check_still, node, tracer.guards[node], text).meta[AGAIN] = True
    return list(dict.fromkeys(found))


def _condition_text(
    node: fx.Node, inputs: dict[fx.Node, str], tracer: ModuleTracer, lasting: fx.Node | None
) -> str | None:
    if is_object(tracer.guards[node]):
        return None
    text = _traced_expression(node, inputs, tracer)
    if text is not None or lasting is None or not lasting < node:
        return text
    with tracer.sizes.deriving():  # it is too late for a check
        return _traced_expression(node, inputs, tracer)


def _guard_numbers(node: fx.Node, tracer: ModuleTracer) -> None:
    """Guard on the class of each number of an object that ``node`` is computed from: None is not equal to 0 either."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or node.meta.get(ASSUMED) or size_read(node) is not None:  # sizes are always integers
            continue
        seen.add(node)
        kind = type(node.meta.get("spec"))
        if kind not in (int, float, bool) or not is_result(node):
            pending += node.all_input_nodes if node.op == "call_function" else []
            continue
        if not any(user.target is IS_PLAIN[kind] for user in node.users):
            with node.graph.inserting_after(node):
                assume(tracer, IS_PLAIN[kind], (node,))


def kind_conditions(tracer: ModuleTracer, inputs: dict[fx.Node, str], signature: Signature) -> list[str]:
    """Return conditions for the kinds of tensors read from objects before the graph runs, which then need no check."""
    found = []
    other_code = next(filter(runs_other_code, tracer.graph.nodes), None)
    for node in tracer.graph.nodes:
        if node.target is getattr and node.meta.get(KIND) and not _changed_before(node):
            text = _traced_expression(node, inputs, tracer)
            if text is not None:
                dtype, rank, device = node.meta[KIND]
                if other_code is None or node < other_code:  # else it is checked once more where it is read
                    del node.meta[KIND]
                asked = signature.name(is_kind, "is_kind")
                found.append(
                    f"{asked}({text}, {signature.name(dtype, 'dtype') if dtype else None}, {rank}, {device!r})"
                )
    return found


def _is_read(node: fx.Node) -> bool:
    """Check whether ``node`` reads a value that may be of any class: an attribute or item of an object."""
    return node.target in (getattr, operator.getitem) and size_read(node) is None


def _condition(text: str, value: Any, is_read: bool) -> str:
    if isinstance(value, bool) and not is_read:
        return text if value else f"not {text}"
    if value is None or isinstance(value, torch.dtype):
        return f"{text} is {value}"
    parts = [f"type({text}) is {type(value).__name__}"] if is_read and type(value) in _PLAIN else []
    parts += [f"{text} == {literal(value)}"]
    if any(map(has_sign_of_zero, value if type(value) is tuple else (value,))):
        parts += [f"str({text}) == {str(value)!r}"]
    return " and ".join(parts)


def _traced_expression(node: fx.Node, inputs: dict[fx.Node, str], tracer: ModuleTracer) -> str | None:
    try:
        return expression(node, inputs, tracer)
    except NotBeforehand:
        return None


def _insert_check(graph: fx.Graph, node: fx.Node, value: Any, lasting: fx.Node | None) -> None:
    if lasting is None or not lasting < node:
        _insert(graph, check, node, value, node.name)
    elif node.meta.get(ASSUMED):
        _insert(graph, check_still, node, value, node.name)
    elif value is None:  # a method that returns nothing, most often
        with graph.inserting_after(node):
            graph.call_function(check_same, (None, node, f"the result of {node.name}"))
    else:
        raise TraceError(
            f"a branch depends on {node.name}, which is only known after {lasting.name} may have changed state",
            where=node.meta.get("source", ""),
            fix="schedule the submodules instead, or mark the module that holds the branch as a leaf",
        )


def _insert(graph: fx.Graph, checked_by: Callable[..., None], node: fx.Node, value: Any, what: str) -> fx.Node:
    with graph.inserting_after(node):
        expected = graph.call_function(Constant(value)) if is_object(value) else value
    with graph.inserting_after(expected if is_object(value) else node):
        inserted = graph.call_function(checked_by, (node, expected, what))
    inserted.meta["source"] = node.meta.get("source", "")
    return inserted


def _reads_state(node: fx.Node) -> bool:
    """Check whether ``node`` is computed from state that code outside the graph may change."""
    pending, seen = [node], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node.op == "get_attr" or node.meta.get("object"):
            return True
        if node.target is getattr and node.args[1] == "requires_grad":
            return True
        pending += set(node.all_input_nodes) - seen
        seen.update(pending)
    return False
