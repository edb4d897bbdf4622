"""Vocabularies shared out: embeddings by rows, with the projections onto them, whose outputs are gathered."""

from __future__ import annotations

from typing import Any

from torch import nn

from schedule.capture.recording.specs import TensorSpec
from schedule.distributed.planning.gradients import Users
from schedule.distributed.planning.plan_steps import VOCABULARY, Group, ShardStep, SyncStep
from schedule.distributed.planning.values import Layer, Propagated, nbytes
from schedule.distributed.tensor_parallel.modules import role_of
from schedule.patterns.values import OpNode


class Vocabularies:
    """Finds them in a graph.

    Args:
        found: of the graph.
        root: where its paths begin.
        ranks: how many share.
        users: the operations that read each value.
        differentiable: values that a gradient flows into.
        whole: parameters, by id, that other groups have, or that code reads which knows nothing of shares.

    Attributes:
        taken: parameters, by id, that are shared out here.
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
        """One for each vocabulary."""
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
        """Whether the model returns the outputs of ``layer``, of that size, as they are or element by element."""
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
