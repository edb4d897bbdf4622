"""Gradient flow through a graph with propagated dimensions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from schedule.capture import TensorSpec, leaves
from schedule.distributed.planning.factored_values import Propagated
from schedule.distributed.planning.factors import Factor
from schedule.distributed.planning.owned import holds
from schedule.patterns.normalized_nodes import OpNode, operands

_WRITES = ("copy_", "setitem")

Users = dict[OpNode, list[OpNode]]


def users_of(found: Propagated) -> Users:
    """Return the operations reading each value, in graph order."""
    users: Users = {node: [] for node in found.nodes}
    for node in found.nodes:
        for operand in dict.fromkeys(operands(node.args)):
            users[operand].append(node)
    return users


def differentiable(found: Propagated, root: nn.Module, inputs: Collection[OpNode] = ()) -> set[OpNode]:
    """Return the values with a gradient.

    Args:
        found: the propagated dimensions of a graph.
        root: the module at which the paths in the graph begin.
        inputs: placeholders with a gradient.
    """
    trained = {path for path, parameter in root.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    values: set[OpNode] = set(inputs)
    for node in found.nodes:
        if any(one in values for one in operands(node.args)):
            values.update(written(node))
        if not _floating(node.spec) or node.op == "detach":
            continue
        if node.op == "get_attr" or node.attr is not None:
            if str(node.target) in trained:
                values.add(node)
            continue
        own = node.module is not None and any(parameter.requires_grad for parameter in node.module.parameters())
        if own or any(one in values for one in operands(node.args)):
            values.add(node)
    return values


def written(node: OpNode) -> Iterator[OpNode]:
    """Yield the values whose later readers see what ``node`` writes in place.

    They are the tensors that its first operand is a view of, and for ``copy_`` and ``x[index] = value`` the operand
    itself. Every other in-place operation returns its operand, and later readers read that result.
    """
    assigns = node.op.rpartition(".")[2] in _WRITES
    if not (assigns or node.mutates):
        return
    target = next(operands(node.args), None)
    if assigns and target is not None:
        yield target
    while target is not None and (target.is_view or target.definition is None):  # unknown code may return a view
        target = next(operands(target.args), None)
        if target is not None:
            yield target


def _floating(spec: Any) -> bool:
    return any(isinstance(leaf, TensorSpec) and leaf.dtype.is_floating_point for _, leaf in leaves(spec))


def parameters_of(
    found: Propagated, users: Users, moving: set[OpNode], value: OpNode, factor: Factor
) -> list[str] | None:
    """Return the replicated parameters behind ``value`` if it depends on nothing else and meets only sharded values.

    Returns:
        Their paths; None if ``value`` also depends on other inputs with a gradient, an intermediate value has another
        user, or an operation without the factor reads ``value``.
    """
    paths: list[str] = []
    pending = [value]
    while pending:
        node = pending.pop()
        if node not in moving:
            continue
        if node is not value and len(users[node]) > 1:
            return None
        if node.op == "get_attr" or node.attr is not None:
            if str(node.target) not in found.tensors:
                return None
            paths.append(str(node.target))
        elif node.op in ("call_module", "placeholder") or next(operands(node.args), None) is None:
            return None
        pending += operands(node.args)
    return paths if all(holds(found, user, factor) for user in users[value]) else None
