"""Forward of a sharded projection as a separate graph.

::

    before:  y = F.linear(x, self.weight, self.bias)
    column:  x = copy_to_tensor_parallel(x);  y = F.linear(x, self.weight.to_local()) + self.bias.to_local()
    row:     y = reduce_from_tensor_parallel(F.linear(x, self.weight.to_local())) + self.bias

A partial sum is reduced before the bias is added. The graph holds for every input, so it needs no guards.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from fused.sharding import local_part
from schedule.capture import Call, GuardSet, Parameters, Signature, Specialization, TensorSpec, original_class
from schedule.distributed.communication import collectives
from schedule.distributed.communication.groups import group_rank
from schedule.distributed.tensor_parallel.sharded_modules import (
    LEFT,
    LINEAR,
    ROW,
    ModuleSharding,
    Projection,
    Sync,
    incomplete,
    projection_of,
    sync_key,
)
from schedule.util.errors import ShardError


def refuse(x: Tensor, why: str) -> Tensor:
    """Raise for a forward with incomplete sharding, as the target of a graph node.

    Raises:
        ShardError: always.
    """
    raise ShardError(f"a half-sharded module was called: {why}")


def sharded_specializations(
    module: nn.Module, sharding: ModuleSharding, like: TensorSpec | None = None
) -> tuple[Specialization, Specialization]:
    """Return the specializations of a sharded projection for training and evaluation.

    Args:
        module: the projection; its parameters are sharded already.
        sharding: its sharding.
        like: spec of its input in the recorded run, before any module was sharded.
    """
    name = Parameters(original_class(module).forward).names[0]
    graph = _Writer(module, sharding, like).written(name)
    signature = Signature(inputs={name: name})
    spec = next(iter(graph.nodes)).meta["spec"]
    made = Specialization(
        graph=graph,
        signature=signature,
        training=True,
        guards=(),
        guard_set=GuardSet(),
        inlined={},
        call=Call((spec,), {}, None),
    )
    return made, replace(made, training=False)


class _Writer:
    """Builder of the graph of one forward, including the specs of its values."""

    def __init__(self, module: nn.Module, sharding: ModuleSharding, like: TensorSpec | None) -> None:
        projection = projection_of(module)
        self.projection: Projection = projection or LINEAR
        self.module, self.sharding = module, sharding
        self.graph = fx.Graph()
        self.role = sharding.role(module)
        weight = self.share(module._parameters["weight"], "weight")
        leading = like.shape[:-1] if like is not None else (1, 1)
        features = weight.shape[self.projection.input]
        self.given = replace(weight, shape=(*leading, features), requires_grad=False)
        self.result = replace(weight, shape=(*leading, weight.shape[self.projection.output]))

    def call(self, function: Any, *args: Any, spec: TensorSpec) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta["spec"] = spec
        return node

    def written(self, name: str) -> fx.Graph:
        x = self.graph.placeholder(name)
        x.meta["spec"] = self.given
        missing = incomplete(self.module, self.sharding)
        if missing:
            self.graph.output(self.call(refuse, x, missing, spec=self.result))
            return self.graph
        weight, bias = self.local("weight"), self.local("bias")
        x = self.before(x)
        product = F.linear if self.projection.transposed else torch.matmul
        y = self.call(product, x, weight, spec=self.result)
        if self.role == ROW:
            y, bias = self.reduced(y, bias)
        if bias is not None:
            y = self.call(operator.add, y, bias, spec=y.meta["spec"])
        if self.role != ROW:
            y = self.gathered(y)
        if "bwd_pre" in self.sharding.syncs:
            y = self.call(collectives.copy_to_tensor_parallel, y, self.sharding.group, spec=y.meta["spec"])
        self.graph.output(y)
        self.graph.lint()
        return self.graph

    def local(self, name: str) -> fx.Node | None:
        parameter = self.module._parameters.get(name)
        if parameter is None:
            return None
        read = self.graph.get_attr(name)
        read.meta["spec"] = TensorSpec.of(parameter)
        if isinstance(parameter, DTensor):
            local = self.graph.call_method("to_local", (read,))
            local.meta["spec"] = local_spec(parameter)
            return local
        split, group = self.sharding.splits.get(name), self.sharding.group
        if sync_key("bwd_post", name) in self.sharding.syncs:
            return self.call(collectives.copy_to_tensor_parallel, read, group, spec=read.meta["spec"])
        if split is None or not split.stays_whole:
            return read
        whole = self.call(collectives.copy_to_tensor_parallel, read, group, spec=read.meta["spec"])
        spec = self.share(parameter, name)
        how = split.axis, split.replicas, split.common
        return self.call(collectives.replicated_part, whole, group, *how, spec=spec)

    def share(self, parameter: nn.Parameter | None, name: str) -> TensorSpec:
        """Return the spec of this rank's shard, also for a parameter stored whole."""
        spec, split = local_spec(parameter), self.sharding.splits.get(name)
        if split is None or not split.stays_whole:
            return spec
        ranks, shape = self.sharding.ranks, list(spec.shape)
        shape[split.axis] = split.local(ranks, group_rank(self.sharding.group))
        return replace(spec, shape=tuple(shape))

    def before(self, x: fx.Node) -> fx.Node:
        """Synchronize the input: first what ``fwd_pre`` makes of it, then the gradient of that, in ``bwd_post``."""
        group, syncs = self.sharding.group, self.sharding.syncs
        if (sync := syncs.get("fwd_pre")) is not None:
            if sync.op == "all_gather":
                gather = collectives.gather_from_sequence_parallel
                x = self.call(gather, x, group, sync.axis, spec=x.meta["spec"])
            elif sync.op == "scatter":
                whole = x.meta["spec"]
                features = self.sharding.splits["weight"].size
                x.meta["spec"] = replace(whole, shape=(*whole.shape[:-1], features))
                x = self.call(collectives.scatter_to_tensor_parallel, x, group, -1, spec=whole)
            else:
                x = self.function(sync, x)
        if (sync := syncs.get("bwd_post")) is not None:
            if sync.op == "all_reduce":
                x = self.call(collectives.copy_to_tensor_parallel, x, group, spec=x.meta["spec"])
            else:
                x = self.function(sync, x, on_gradient=True)
        return x

    def reduced(self, y: fx.Node, bias: fx.Node | None) -> tuple[fx.Node, fx.Node | None]:
        sync, group = self.sharding.syncs.get("fwd_post"), self.sharding.group
        if sync is None:
            return y, bias
        if sync.op == "all_reduce":
            return self.call(collectives.reduce_from_tensor_parallel, y, group, spec=self.result), bias
        if sync.op != "reduce_scatter":
            return self.function(sync, y), bias
        axis = sync.axis if sync.axis is not None else -2
        shape = list(self.result.shape)
        shape[axis] //= self.sharding.ranks
        spec = replace(self.result, shape=tuple(shape))
        y = self.call(collectives.reduce_scatter_to_sequence_parallel, y, group, axis, spec=spec)
        if bias is not None:  # each rank adds it to other tokens: its gradient is a partial sum
            bias = self.call(collectives.copy_to_tensor_parallel, bias, group, spec=bias.meta["spec"])
        return y, bias

    def gathered(self, y: fx.Node) -> fx.Node:
        sync = self.sharding.syncs.get("fwd_post")
        if sync is None:
            return y
        if sync.op not in ("all_gather", LEFT):
            return self.function(sync, y)
        size = self.sharding.splits["weight"].size
        spec = replace(self.result, shape=(*self.result.shape[:-1], size))
        if sync.op == LEFT:
            left = collectives.left_in_tensor_parallel
            return self.call(left, y, self.graph.get_attr("weight"), self.sharding.group, size, spec=spec)
        return self.call(collectives.gather_from_tensor_parallel, y, self.sharding.group, -1, size, spec=spec)

    def function(self, sync: Sync, value: fx.Node, on_gradient: bool = False) -> fx.Node:
        return self.call(UserFunction(sync.op, on_gradient), value, spec=value.meta["spec"])


class UserFunction:
    """Node target to apply a user's function to a tensor or to its gradient."""

    __module__ = __name__

    def __init__(self, function: Any, on_gradient: bool) -> None:
        self.function, self.on_gradient = function, on_gradient
        self.__name__ = "on_gradient" if on_gradient else "synchronized"

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the function to ``x``, or to the gradient of ``x`` in the backward pass."""
        if self.on_gradient:
            return collectives.on_gradient(x, self.function)
        result: Tensor = self.function(x)
        return result


def local_spec(parameter: nn.Parameter | None) -> TensorSpec:
    """Return the spec of this rank's shard."""
    if parameter is None:
        raise ShardError("there is no weight")
    return TensorSpec.of(local_part(parameter))
