"""Collectives of modules other than plain projections, run on shards of their own parameters.

The experts of a mixture, or a custom Linear class of a model, multiply in their own forward. Run on a shard of its
parameters, such a module returns either its shard of the outputs or a partial sum. A partial sum is all-reduced over
the ranks, and so is the gradient of every replicated input and parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from schedule.capture.recording.specs import TensorSpec
from schedule.capture.tracing.specialization import Specialization
from schedule.distributed.planning.factors import Factor, factors, has, leads, take
from schedule.distributed.planning.plan_steps import SyncStep
from schedule.distributed.planning.propagation import propagate
from schedule.distributed.planning.values import Propagated
from schedule.patterns.values import OpNode, operands

_LINEAR_IN_ONE = frozenset((
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand",
    "contiguous", "cast", "to", "identity", "clone", "sum", "mean", "getitem", "select", "narrow", "index_select",
    "gather", "split", "chunk", "unbind", "index_add", "movedim", "type_as",
))  # fmt: skip
_PRODUCTS = frozenset(("mul", "matmul", "bmm", "mm", "linear", "_grouped_mm", "einsum"))


def synchronized(path: str, module: nn.Module, whole: Specialization, axes: dict[str, tuple[int, int]]) -> Any:
    """Return the collectives needed by ``module`` to compute with shards of its parameters.

    Args:
        path: the path of the module.
        module: the module.
        whole: the specialization with its graph.
        axes: name of each sharded parameter → (axis, packed parts).

    Returns:
        The steps, or the reason as a string if it cannot be sharded.
    """
    found = propagate(whole.graph, module)
    shared = {_factor(found, name, axis, parts) for name, (axis, parts) in axes.items()}
    known = [factor for factor in shared if factor is not None]
    if len(shared) != 1 or not known:
        return "its own parameters are not sharded along one dimension"
    (factor,) = known
    partial = _partial_sums(found, factor)
    if isinstance(partial, str):
        return partial
    outputs = [one for node in found.nodes if node.op == "output" for one in operands(node.args)]
    floating = [one for one in outputs if _is_floating(one.spec)]
    sums = [one in partial for one in floating]
    if not floating or not (all(sums) or all(holds(found, one, factor) for one in floating)):
        return "some of its outputs are whole and others are not"
    if any(sums) and len(floating) > 1:
        return "several of its outputs are partial sums"
    steps = [SyncStep(path, "fwd_post", "all_reduce", nbytes=floating[0].spec.nbytes)] if any(sums) else []
    return [*steps, *_gradient_steps(path, module, whole, axes, found, factor)]


def _gradient_steps(
    path: str,
    module: nn.Module,
    whole: Specialization,
    axes: dict[str, tuple[int, int]],
    found: Propagated,
    factor: Factor,
) -> Iterator[SyncStep]:
    """Yield the all-reduces of the gradients of replicated inputs and parameters."""
    for node in found.nodes:
        if node.op == "placeholder" and _is_floating(node.spec) and not holds(found, node, factor):
            name = whole.signature.inputs.get(str(node.target), str(node.target))
            yield SyncStep(path, "bwd_post", "all_reduce", argument=name, nbytes=node.spec.nbytes)
    for name, parameter in module._parameters.items():
        if parameter is not None and name not in axes:
            size = parameter.numel() * parameter.element_size()
            yield SyncStep(path, "bwd_post", "all_reduce", argument=name, nbytes=size)


def _is_floating(spec: Any) -> bool:
    return isinstance(spec, TensorSpec) and spec.dtype.is_floating_point


def holds(found: Propagated, value: Any, factor: Factor) -> bool:
    """Check whether a value has the factor in one of its dimensions."""
    return any(has(dim, factor) for dim in _dims(found.dims.get(value)))


def holds_leading(found: Propagated, value: Any, factor: Factor) -> bool:
    """Check whether a value has the factor at the beginning of a dimension with a replicated rest."""
    return any(leads(one, factor) for dim in _dims(found.dims.get(value)) for one in factors(dim))


def _dims(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [dim for one in value for dim in _dims(one)]
    return value or []


def _factor(found: Propagated, name: str, axis: int, parts: int) -> Factor | None:
    """Return the outermost factor inside the ``parts`` packed parts of a parameter's axis."""
    split = take(found.tensors[name][axis], parts) if name in found.tensors else None
    return next(iter(factors(split[1])), None) if split is not None else None


def _partial_sums(found: Propagated, factor: Factor) -> set[OpNode] | str:
    """Return the values holding partial sums, or a refusal if a nonlinear operation reads one."""
    partial: set[OpNode] = set()
    for node in found.nodes:
        if any(factor in factors(dim) for dim in found.contracted.get(node, ())):
            partial.add(node)
            continue
        given = [one for one in operands(node.args) if one in partial]
        if not given or node.is_metadata or node.op == "output":
            continue
        tensors = [one for one in operands(node.args) if isinstance(one.spec, (TensorSpec, tuple, list))]
        first = next(operands(node.args), None)
        linear = (
            (node.op in _LINEAR_IN_ONE and given == [first])
            or (node.op in _PRODUCTS and len(given) == 1)
            or (node.op == "div" and given == [first])
            or (node.op in ("add", "sub", "cat", "stack") and len(given) == len(tensors))
        )
        if not linear:
            return f"{node.op} of a partial sum is no partial sum"
        partial.add(node)
    return partial
