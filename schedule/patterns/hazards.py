"""Checks of whether a region of a graph may be computed at one point: outside uses, and effects in between."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from fused.torch_internals.tensor_kinds import storage_of
from schedule.capture import is_check, updated_state
from schedule.patterns.match_regions import detour, escape
from schedule.patterns.side_effects import Effects, effects, memory_of
from schedule.util.errors import MatchError

Modules = Mapping[str, nn.Module] | None


class Hazards:
    """Effects and shared memory of the nodes of one graph, cached while it does not change."""

    def __init__(self, modules: Modules = None) -> None:
        self.modules = modules
        self._effects: dict[fx.Node, Effects] = {}
        self._memory: dict[fx.Node, frozenset[fx.Node]] = {}
        self._attributes: dict[fx.Node, frozenset[fx.Node]] = {}

    def effects(self, node: fx.Node) -> Effects:
        """Return the side effects of ``node``."""
        if node not in self._effects:
            self._effects[node] = effects(node, self.modules)
        return self._effects[node]

    def memory(self, nodes: Collection[fx.Node]) -> set[fx.Node]:
        """Return the values ``nodes`` may share memory with."""
        shared: set[fx.Node] = set()
        for node in nodes:
            shared |= memory_of(node, self.modules, self._memory)
        return shared.union(*(self._same_attribute(node) for node in shared if node.op == "get_attr"))

    def _same_attribute(self, node: fx.Node) -> frozenset[fx.Node]:
        """Return all nodes of the graph with a tensor of ``node``, read by this path or another."""
        if node not in self._attributes:
            reads = {each: self._keys(each) for each in node.graph.find_nodes(op="get_attr")}
            by_key: dict[Hashable, set[fx.Node]] = {}
            for each, keys in reads.items():
                for key in keys:
                    by_key.setdefault(key, set()).add(each)
            self._attributes = {each: frozenset().union(*map(by_key.__getitem__, reads[each])) for each in reads}
        return self._attributes[node]

    def _keys(self, node: fx.Node) -> set[Hashable]:
        """Return a key for each tensor read here, common to all names of it and of its views."""
        tensors = _tensors_read(node, self._value(str(node.target)))
        return {storage_of(each) if each.layout is torch.strided else id(each) for each in tensors} or {
            str(node.target)
        }

    def _value(self, target: str) -> Any:
        path, _, name = target.rpartition(".")
        module = (self.modules or {}).get(path)
        own: dict[str, Any] = {} if module is None else vars(module)
        tables = (own.get("_parameters", {}), own.get("_buffers", {}), own)
        return next((table[name] for table in tables if table.get(name) is not None), None)

    def attribute(self, target: str) -> torch.Tensor | None:
        """Return the parameter, buffer or other tensor at a path, or None if there is none, or it is not known."""
        value = self._value(target)
        return value if isinstance(value, torch.Tensor) else None

    def may_change(self, node: fx.Node, values: Collection[fx.Node]) -> bool:
        """Check whether an impure node may change any of ``values``, which include what they share memory with.

        Unknown code may change what it is given, and what it has a reference to: parameters, and what unknown code was
        given or has returned before.
        """
        if is_check(node.target):
            return False
        known = self.effects(node)
        if not self.memory(node.all_input_nodes if known.opaque else known.mutates).isdisjoint(values):
            return True
        if known.state and any(value.op == "get_attr" and self._is_in(value, known.state) for value in values):
            return True
        return known.opaque and any(self._is_known_before(value, node) for value in values)

    def _is_in(self, value: fx.Node, storages: Collection[Hashable]) -> bool:
        """Check whether an attribute is, or may be, in one of these storages."""
        tensor = self.attribute(str(value.target))
        return tensor is None or tensor.layout is not torch.strided or storage_of(tensor) in storages

    def _is_known_before(self, value: fx.Node, node: fx.Node) -> bool:
        """Check whether unknown code may have a reference to ``value`` by the time that ``node`` runs."""
        if value.op == "get_attr" or self.effects(value).opaque:
            return True
        return any(user < node and self.effects(user).opaque for user in value.users)

    def has_state_beside(self, node: fx.Node, values: Collection[fx.Node]) -> bool:
        """Check whether the side effects of ``node`` are known running statistics, and none of ``values``."""
        return bool(self.effects(node).state) and not self.may_change(node, values)

    def impure_between(self, first: fx.Node, last: fx.Node, outside: Collection[fx.Node]) -> Iterator[fx.Node]:
        """Yield the impure nodes from ``first`` up to ``last`` (exclusive), except those in ``outside``."""
        node = first
        while node is not last:
            if node not in outside and not self.effects(node).pure:
                yield node
            node = node.next


def _tensors_read(node: fx.Node, value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors read by a graph from ``value``, at ``node``, through attributes and items."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for read in node.users:
        if read.target in (getattr, operator.getitem) and read.args[0] is node:
            with contextlib.suppress(AttributeError, LookupError, TypeError):
                found = getattr(value, str(read.args[1])) if read.target is getattr else value[read.args[1]]
                yield from _tensors_read(read, found)


def check_region(region: Collection[fx.Node], outputs: Collection[fx.Node], hazards: Hazards) -> None:
    """Raise if a region cannot be computed at one point with the same result.

    Raises:
        MatchError: an interior value is used outside, the region is not convex, or a mutation, unknown call
            or random draw would be reordered.
    """
    leak = escape(region, outputs)
    if leak is not None:
        raise MatchError(
            f"{leak[0].name}, an interior value of the match, is used outside by {leak[1].name}",
            node=leak[1],
            fix="return that value from the pattern too, or match a smaller part",
        )
    between = detour(region, outputs)
    if between is not None:
        raise MatchError(
            f"{between.name} lies between parts of the match: it reads one and another reads it",
            node=between,
            fix="include it in the pattern, or match a smaller part",
        )
    first, last = min(region), max(region)
    _check_order(region, first, last, hazards)
    for node in region:
        if hazards.effects(node).mutates:
            _check_mutation(node, region, outputs, hazards)


def _check_order(region: Collection[fx.Node], first: fx.Node, last: fx.Node, hazards: Hazards) -> None:
    """Raise if a node between the first and the last one may not be reordered with the region."""
    inside = [hazards.effects(n) for n in region]
    draws, unknown = any(e.rng for e in inside), any(e.opaque for e in inside)
    shared: set[fx.Node] | None = None
    for node in hazards.impure_between(first, last, region):
        known = hazards.effects(node)
        if known.barrier:
            _refuse(node, "changes what the operations after it mean")
        if known.rng and (draws or unknown):
            _refuse(node, "draws random numbers between those of the match")
        if known.opaque and (draws or unknown):
            _refuse(node, "runs unknown code, which may draw random numbers or keep state, amid the match")
        if shared is None:
            values = {n for r in region for n in r.all_input_nodes} | set(region)
            shared = hazards.memory(values)
        if hazards.may_change(node, shared):
            _refuse(node, "may change a value of the match in place amid it")


def _refuse(node: fx.Node, why: str) -> None:
    raise MatchError(
        f"{node.name} {why}, so the match cannot be computed at one point",
        node=node,
        fix="match a smaller part, or move that line before or after it",
    )


def _check_mutation(node: fx.Node, region: Collection[fx.Node], outputs: Collection[fx.Node], hazards: Hazards) -> None:
    """Raise if an in-place operation of the region changes a value still read outside."""
    state = updated_state(node)
    if state:
        _check_update(node, state, region, hazards)
    memory = hazards.memory(set(hazards.effects(node).mutates).difference(state))
    for owner in memory:
        if owner.op in ("placeholder", "get_attr") or hazards.effects(owner).opaque:
            raise MatchError(
                f"{node.name} changes {owner.name} in place, which is seen outside the match",
                node=node,
                fix="use the operation that is not in place",
            )
        reader = _later_reader(owner, node, region, hazards)
        if reader is None and owner in outputs and owner is not node:
            reader = owner
        if reader is not None:
            raise MatchError(
                f"{node.name} changes {owner.name} in place and {reader.name} reads it afterwards",
                node=reader,
                fix="use the operation that is not in place, or include the reader in the pattern",
            )


def _check_update(node: fx.Node, state: Collection[fx.Node], region: Collection[fx.Node], hazards: Hazards) -> None:
    """Raise unless the update of state by a node of the region may happen anywhere between its first and last node."""
    first, last = min(region), max(region)
    if first is last:
        return
    memory = hazards.memory(state)
    between = hazards.impure_between(first, last, region)
    other = next((each for each in between if not hazards.has_state_beside(each, memory)), None)
    if other is not None:
        _refuse(other, f"may use or change the state that {node.name} updates")
    for owner in state:
        if owner.op != "get_attr":
            raise MatchError(
                f"{node.name} updates {owner.name}, which is no buffer of the module",
                node=node,
                fix="keep running statistics in buffers",
            )
    reader = first.next
    while reader is not last:
        if reader not in region and not memory.isdisjoint(hazards.memory(reader.all_input_nodes)):
            _refuse(reader, f"reads the state that {node.name} updates")
        reader = reader.next


def _later_reader(owner: fx.Node, mutation: fx.Node, region: Collection[fx.Node], hazards: Hazards) -> fx.Node | None:
    """Return a node outside the region reading ``owner``'s memory after ``mutation``, perhaps through a view."""
    stack, seen = [owner], {owner, mutation}
    while stack:
        for user in stack.pop().users:
            if user in seen or user in region:
                continue
            if mutation < user:
                return user
            seen.add(user)
            if not hazards.effects(user).fresh:
                stack.append(user)
    return None


def plan_hoist(inputs: Collection[fx.Node], user: fx.Node, hazards: Hazards) -> list[fx.Node]:
    """Return the nodes to move before ``user`` to make all ``inputs`` available there, in order.

    Raises:
        MatchError: one of them depends on ``user``, has effects, or reads a value that is changed in between.
    """
    late: set[fx.Node] = set()
    stack: list[Any] = [n for n in inputs if not n < user]
    while stack:
        node = stack.pop()
        if node not in late:
            late.add(node)
            stack.extend(n for n in node.all_input_nodes if not n < user)
    moved = sorted(late)
    for node in moved:
        if node is user or not hazards.effects(node).pure or node.op == "placeholder":
            raise MatchError(
                f"the input {node.name} is made only after {user.name} has used an output of the match",
                node=node,
                fix=f"compute {node.name} before {user.name}",
            )
        shared = hazards.memory([node, *node.all_input_nodes])
        for other in hazards.impure_between(user, node, moved):
            if hazards.effects(other).barrier or hazards.may_change(other, shared):
                _refuse(other, f"may change what {node.name} reads")
    return moved
