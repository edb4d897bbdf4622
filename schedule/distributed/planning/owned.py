"""Collectives of modules other than plain projections, run on shards of their own parameters.

The experts of a mixture, or a custom Linear class of a model, multiply in their own forward. Run on a shard of its
parameters, such a module returns either its shard of the outputs or a partial sum. A partial sum is all-reduced over
the ranks, and so is the gradient of every replicated input and parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from schedule.capture import Call, Specialization, TensorSpec, original_class
from schedule.distributed.planning.factored_values import Propagated, nbytes
from schedule.distributed.planning.factors import Factor, factors, has, leads, take
from schedule.distributed.planning.plan_steps import SyncStep
from schedule.distributed.planning.propagation import propagate
from schedule.distributed.tensor_parallel.sharded_modules import MEANS, OWN, role_of
from schedule.patterns.normalized_nodes import OpNode, operands

_LINEAR_IN_INPUT = frozenset((
    "view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand",
    "contiguous", "cast", "to", "identity", "clone", "sum", "mean", "getitem", "select", "narrow", "index_select",
    "gather", "split", "chunk", "unbind", "movedim", "type_as", "div",
))  # fmt: skip
_PRODUCTS = frozenset(("mul", "matmul", "bmm", "mm", "linear", "_grouped_mm", "einsum"))
_SUMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub"), ("input", "other")),
    **dict.fromkeys(("cat", "stack"), ("tensors",)),
}
_ADDENDS = {"addmm": "input", "baddbmm": "input"}


def owners(root: nn.Module, axes: Mapping[tuple[str, int], int]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the modules that compute with shards of their own parameters, and have no sharded submodules.

    Args:
        root: the module at which the paths begin.
        axes: (path of a parameter, axis) → packed parts.

    Returns:
        Path of a module → name of each of its sharded parameters → (axis, packed parts).
    """
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for (path, axis), parts in axes.items():
        owner, _, name = path.rpartition(".")
        if role_of(root.get_submodule(owner), name, axis) == OWN:
            found.setdefault(owner, {})[name] = (axis, parts)
    sharded = {path.rpartition(".")[0] for path, _ in axes}
    return {owner: own for owner, own in found.items() if not any(_is_below(one, owner) for one in sharded)}


def is_in_any(node: OpNode, paths: Collection[str]) -> bool:
    """Check whether ``node`` was traced in the forward of a module in ``paths``, or of one of its submodules."""
    if node.fx is None:
        return False
    path = str(node.fx.target) if node.fx.op == "call_module" else node.fx.meta.get("module", "")
    return any(path == one or _is_below(path, one) for one in paths)


def _is_below(path: str, ancestor: str) -> bool:
    return path != ancestor and f"{path}.".startswith(f"{ancestor}." if ancestor else "")


def synchronized(
    path: str,
    module: nn.Module,
    whole: Specialization,
    axes: dict[str, tuple[int, int]],
    ranks: int,
    rehearsed: Callable[[Call], Mapping[fx.Node, Any]],
) -> list[SyncStep] | str:
    """Return the collectives needed by ``module`` to compute with shards of its parameters.

    Args:
        path: the path of the module.
        module: the module.
        whole: the specialization with its graph.
        axes: name of each sharded parameter → (axis, packed parts).
        ranks: the number of ranks.
        rehearsed: function from the call on one rank to the spec of every operation's result there.

    Returns:
        The steps, or the reason as a string if it cannot be sharded.
    """
    sharded = {id(module._parameters.get(name)) for name in axes}
    for name, parameter in module._parameters.items():
        if name not in axes and parameter is not None and id(parameter) in sharded:
            return f"{name} is another name of a sharded parameter"
    found = propagate(whole.graph, module, averages=True)
    shared = {_factor(found, name, axis, parts) for name, (axis, parts) in axes.items()}
    known = [factor for factor in shared if factor is not None]
    if len(shared) != 1 or not known:
        return "its own parameters are not sharded along one dimension"
    (factor,) = known
    own = rehearsed(call_on_one_rank(module, whole, found, factor, ranks))
    for node in found.nodes:
        expected = spec_on_one_rank(found, node, factor, ranks)
        if node.fx is not None and node.fx in own and not _has_shape(expected, own[node.fx]):
            return f"{node.op} does not keep the shards of its operands apart"
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
    averaged = [any(has(dim, factor) for dim in dims) for dims in found.averaged.values()]
    if any(averaged) and not all(averaged):
        return "some of its means are over sharded features and others are not"
    steps = [SyncStep(path, "fwd_post", "all_reduce", nbytes=floating[0].spec.nbytes)] if any(sums) else []
    if averaged and all(averaged):
        steps.append(SyncStep(path, MEANS, "all_reduce", nbytes=sum(nbytes(node.spec) for node in found.averaged)))
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


def spec_on_one_rank(found: Propagated, node: OpNode, factor: Factor, ranks: int) -> Any:
    """Return the spec of a value on one rank, smaller in the dimensions with the factor."""

    def of(spec: Any, dims: Any) -> Any:
        if isinstance(spec, TensorSpec) and dims is not None:
            sharded = [at < len(dims) and has(dims[at], factor) for at in range(spec.ndim)]
            return replace(
                spec, shape=tuple(n // ranks if cut else n for n, cut in zip(spec.shape, sharded, strict=True))
            )
        if isinstance(spec, (tuple, list)) and isinstance(dims, (tuple, list)) and len(spec) == len(dims):
            return type(spec)(of(*pair) for pair in zip(spec, dims, strict=True))
        return spec

    return of(node.spec, found.dims.get(node))


def call_on_one_rank(module: nn.Module, whole: Specialization, found: Propagated, factor: Factor, ranks: int) -> Call:
    """Return the call of ``whole`` with sharded inputs where they have the factor."""
    bound = inspect.signature(original_class(module).forward).bind(module, *whole.call.args, **whole.call.kwargs)
    for node in found.nodes:
        name = whole.signature.inputs.get(str(node.target)) if node.op == "placeholder" else None
        if isinstance(bound.arguments.get(str(name)), TensorSpec):
            bound.arguments[str(name)] = spec_on_one_rank(found, node, factor, ranks)
    return Call(bound.args[1:], bound.kwargs, None)


def _has_shape(spec: Any, own: Any) -> bool:
    return not isinstance(spec, TensorSpec) or not isinstance(own, TensorSpec) or own.shape == spec.shape


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
    """Return the values holding partial sums, or a refusal if an operation on one does not return another.

    A product over the sharded dimension is a partial sum, and so is every linear function of partial sums alone.
    """
    partial: set[OpNode] = set()
    for node in found.nodes:
        contracted = any(factor in factors(dim) for dim in found.contracted.get(node, ()))
        given = [one for one in operands(node.args) if one in partial]
        if not (given or contracted) or node.is_metadata or node.op == "output":
            continue
        addend = node.args.get(_ADDENDS.get(node.op, ""))
        if addend is not None and addend not in partial:
            return f"{node.op} adds a value to a partial sum on every rank"
        if contracted and any(one is not addend for one in given):
            return f"{node.op} multiplies two partial sums"
        if not contracted and not _is_linear(found, node, partial, factor):
            return f"{node.op} of a partial sum is not a partial sum"
        partial.add(node)
    return partial


def _is_linear(found: Propagated, node: OpNode, partial: set[OpNode], factor: Factor) -> bool:
    """Check whether ``node`` is linear in its partial sums taken together, with replicated other operands."""
    given = [one for one in operands(node.args) if one in partial]
    if any(holds(found, one, factor) for one in (node, *operands(node.args)) if one not in given):
        return False
    if node.op in _SUMS:
        summed = [one for name in _SUMS[node.op] for one in _items(node.args.get(name))]
        return all(isinstance(one, OpNode) and one in partial for one in summed)
    if node.op in _LINEAR_IN_INPUT:
        exact = node.args.get("rounding_mode") is None and _stays_floating(node.spec)
        return exact and given == [next(operands(node.args))]
    return node.op in _PRODUCTS and len(given) == 1


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _stays_floating(spec: Any) -> bool:
    specs = _items(spec)
    return all(not isinstance(one, TensorSpec) or one.dtype.is_floating_point for one in specs)
