"""Vocabulary sharding: embeddings by rows, projections onto the vocabulary with gathered outputs."""

from __future__ import annotations

from typing import Any

from torch import nn

from schedule.capture import TensorSpec
from schedule.distributed.planning.factored_values import Layer, Propagated, nbytes
from schedule.distributed.planning.gradients import Users
from schedule.distributed.planning.plan_steps import VOCABULARY, Group, ShardStep, SyncStep
from schedule.distributed.tensor_parallel.sharded_modules import role_of
from schedule.patterns.normalized_nodes import OpNode


class Vocabularies:
    """Search for vocabularies to shard in a graph.

    Args:
        found: the propagated dimensions of the graph.
        root: the module at which its paths begin.
        ranks: the number of tensor-parallel ranks.
        users: the operations reading each value.
        differentiable: the values with a gradient.
        whole: ids of the parameters that belong to other groups or are read directly by code unaware of shards.

    Attributes:
        taken: ids of the parameters sharded here.
    """

    def __init__(
        self,
        found: Propagated,
        root: nn.Module,
        ranks: int,
        users: Users,
        differentiable: set[OpNode],
        whole: set[int],
    ) -> None:
        self.found, self.root, self.ranks, self.users = found, root, ranks, users
        self.differentiable, self.whole = differentiable, whole
        self.taken: set[int] = set()

    def groups(self) -> list[Group]:
        """Return one group for each vocabulary."""
        groups = []
        for layer in self.found.layers:
            if not layer.lookup or role_of(self._module(layer), "weight", 0) is None:
                continue
            if id(self._weight(layer)) in self.taken | self.whole:
                continue
            size, width = self._weight(layer).shape
            others = self.taken | self.whole | {id(self._weight(one)) for one in self.found.layers if one.lookup}
            heads = [
                one
                for one in self.found.layers
                if not one.lookup and id(self._weight(one)) not in others and self.returned(one, size)
            ]
            tied = [one for one in self.found.layers if self._module(one)._parameters["weight"] is self._weight(layer)]
            if size < 2 * self.ranks or not (heads or len(tied) > 1 or size >= 2 * width):
                continue
            group = self.vocabulary(layer, [*heads, *tied], size)
            if group is not None:
                groups.append(group)
        return groups

    def vocabulary(self, layer: Layer, others: list[Layer], size: int) -> Group | None:
        steps, syncs = dict[ShardStep, None](), dict[SyncStep, None]()
        for one in {id(self._module(each)): each for each in [layer, *others]}.values():
            module = self._module(one)
            if role_of(module, "weight", 0) is None:
                return None
            first = not any(self._weight(one) is self._weight_at(step) for step in steps)
            if first:
                steps[ShardStep(one.path, "weight", 0)] = None
            if one.lookup:
                syncs[SyncStep(one.path, "fwd_post", "all_reduce", nbytes=nbytes(one.node.spec))] = None
                continue
            if module._parameters.get("bias") is not None:
                steps[ShardStep(one.path, "bias", 0)] = None
            if one.given in self.differentiable:
                syncs[SyncStep(one.path, "bwd_post", "all_reduce", nbytes=nbytes(one.given.spec))] = None
            syncs[SyncStep(one.path, "fwd_post", "all_gather", nbytes=nbytes(one.node.spec))] = None
        self.taken |= {id(self._weight_at(step)) for step in steps} | {id(self._weight(one)) for one in others}
        name = " ".join(["vocabulary:", *dict.fromkeys(step.path for step in steps)])
        return Group(name, size, list(steps), list(syncs), VOCABULARY)

    def returned(self, layer: Layer, size: int) -> bool:
        """Check whether the model returns the outputs of ``layer``.

        Operations in between are allowed if the last dimension of their results has ``size`` elements.
        """
        pending, seen = [layer.node], set[OpNode]()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node.spec, TensorSpec):
                if node.spec.shape[-1:] == (size,):
                    pending += self.users[node]
            elif node.op == "output" or any(user.op == "output" for user in self.users[node]):
                return True
        return False

    def _module(self, layer: Layer) -> nn.Module:
        return self.root.get_submodule(layer.path)

    def _weight(self, layer: Layer) -> Any:
        return self._module(layer)._parameters["weight"]

    def _weight_at(self, step: ShardStep) -> Any:
        return self.root.get_submodule(step.path)._parameters[step.name]
