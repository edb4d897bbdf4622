"""All-reduce locations for the gradients flowing from sharded into replicated values.

A single key head read by the queries of all heads, or DeepSeek's rotary part of the keys, is replicated on every rank,
and each rank computes a partial sum of its gradient. The partial gradient flows back through other replicated values
and is all-reduced at the output of a module (``bwd_pre``) or at a parameter. A column-parallel layer that reads such a
value does not reduce its own input gradient: the same all-reduce covers it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import nn

from schedule.capture import TensorSpec
from schedule.distributed.planning.factored_values import Propagated
from schedule.distributed.planning.factors import Factor
from schedule.distributed.planning.gradients import Users, written
from schedule.distributed.planning.owned import holds, holds_leading
from schedule.patterns.normalized_nodes import OpNode, operands

Edge = tuple[OpNode, OpNode]
_PARTIAL, _WHOLE, _EITHER = "partial", "whole", "either"


class NoReduction(Exception):
    """Raised with the reason if a partial gradient cannot be all-reduced anywhere."""


@dataclass
class Reductions:
    """Locations of the all-reduces of partial gradients.

    Attributes:
        modules: calls of modules; the gradients of their outputs are reduced.
        parameters: paths of parameters; their gradients are reduced.
        columns: column-parallel layers with an input gradient covered by one of these reductions.
    """

    modules: list[OpNode] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    columns: set[OpNode] = field(default_factory=set)


@dataclass
class PartialGradients:
    """Search for the gradients flowing out of sharded values.

    Attributes:
        found: the propagated dimensions of a graph.
        root: the module at which the paths in the graph begin.
        users: the operations that read each value.
        moving: values with a gradient.
        factor: the factor sharded over the ranks.
        partial: pairs of a replicated value and an operation on sharded values that reads it.
        columns: pairs of an input and the column-parallel layer that reads it; the layer can also reduce this gradient.
    """

    found: Propagated
    root: nn.Module
    users: Users
    moving: Collection[OpNode]
    factor: Factor
    partial: Collection[Edge]
    columns: Collection[Edge]

    def __post_init__(self) -> None:
        nodes = self.found.nodes
        self.whole = {node for node in nodes if node in self.moving and not holds(self.found, node, self.factor)}
        self.kinds: dict[OpNode, str] = {}

    def reductions(self) -> Reductions:
        """Find locations to all-reduce the partial gradients.

        Raises:
            NoReduction: a partial gradient meets a whole one, or is written in place.
        """
        for value in reversed(self.found.nodes):
            kinds = set(self.read(value)) if value in self.whole else set()
            if kinds >= {_PARTIAL, _WHOLE}:
                raise NoReduction(f"the gradient of {value.name} would be a partial sum in part")
            if kinds:
                self.kinds[value] = next(kind for kind in (_PARTIAL, _WHOLE, _EITHER) if kind in kinds)
        partial = self.settled()
        self.check_taken(partial)
        made = Reductions()
        for value in partial:
            if self.is_output(value):
                self.check_calls(value, partial)
                made.modules.append(value)
            elif value.op == "get_attr" or value.attr is not None:
                made.parameters.append(str(value.target))
            made.columns |= {user for user in self.users[value] if (value, user) in self.columns}
        for node in self.found.nodes:
            if any(one in partial for one in written(node)):
                raise NoReduction(f"the gradient of {node.name}, written in place, would be a partial sum")
        return made

    def read(self, value: OpNode) -> Iterator[str]:
        """Yield the kind of gradient from each reader of ``value``."""
        for user in self.users[value]:
            if (value, user) in self.partial:
                yield _PARTIAL
            elif (value, user) in self.columns:
                yield _EITHER
            elif user.op == "output" or user not in self.whole:
                if user.op == "output" or user in self.moving:
                    yield _WHOLE
            elif user in self.kinds:
                yield _WHOLE if self.is_output(user) else self.kinds[user]

    def settled(self) -> dict[OpNode, None]:
        """Return all values with partial gradients.

        A value whose gradient can be of either kind counts as partial if it is combined with a partial one.
        """
        partial = {value: None for value, kind in self.kinds.items() if kind == _PARTIAL}
        pending = list(partial)
        while pending:
            value = pending.pop()
            for user in self.users[value]:
                if self.kinds.get(user) != _EITHER or user in partial or self.is_output(user):
                    continue
                for one in (user, *operands(user.args)):
                    if self.kinds.get(one) == _WHOLE:
                        raise NoReduction(f"the gradient of {one.name} would be a partial sum in part")
                    if one in self.kinds and one not in partial:
                        partial[one] = None
                        pending.append(one)
        return partial

    def check_taken(self, partial: Collection[OpNode]) -> None:
        """Raise if a replicated value taken from a partly sharded tensor does not have a partial gradient.

        Its gradient would be all-reduced together with the others of that tensor.
        """
        for value in self.whole:
            beside = any(holds_leading(self.found, one, self.factor) for one in operands(value.args))
            if beside and value in self.kinds and value not in partial:
                raise NoReduction(f"the gradient of {value.name} would be reduced although it is whole")

    def is_output(self, value: OpNode) -> bool:
        """Check whether ``value`` is the output of a module with parameters.

        Its gradient can be reduced there.
        """
        if value.fx is None or value.fx.op != "call_module" or not isinstance(value.spec, TensorSpec):
            return False
        last = all(user.fx is not value.fx for user in self.users[value])
        return last and any(True for _ in self.root.get_submodule(str(value.fx.target)).parameters())

    def check_calls(self, value: OpNode, partial: Collection[OpNode]) -> None:
        """Raise unless every call of the module computing ``value`` has a partial gradient."""
        module = self.root.get_submodule(str(value.fx.target))  # type: ignore[union-attr]
        for node in self.found.nodes:
            if node.fx is None or node.fx.op != "call_module" or not self.is_output(node):
                continue
            if self.root.get_submodule(str(node.fx.target)) is module and node not in partial:
                raise NoReduction(f"the gradient of {value.name} would be a partial sum in one of several calls")
