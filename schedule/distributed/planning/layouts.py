"""Layouts of the values in one forward, as far as its synchronized modules determine them.

A layout has one letter per dimension, as in a resharding: R for replicated, S for sharded over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from schedule.capture import Specialization, TensorSpec
from schedule.distributed.communication.resharding import Resharding
from schedule.distributed.planning.factors import Dim, factors
from schedule.distributed.planning.propagation import propagate
from schedule.distributed.tensor_parallel.sharded_modules import (
    CHANNEL,
    COLUMN,
    OUTPUTS,
    ModuleSharding,
    Sync,
    features_dim,
    input_names,
    is_sharded,
    sharding_of,
)
from schedule.distributed.tensor_parallel.state import Sharded
from schedule.util.errors import ShardError, TraceError


def check_neighbors(state: Sharded, module: nn.Module, after: ModuleSharding) -> None:
    """Raise if ``module`` would take or give another layout than the modules next to it.

    The forwards of ``module`` and of its caller are followed, as recorded before anything was sharded.

    Args:
        state: the tensor-parallel state with the recorded run.
        module: a module about to be synchronized.
        after: its sharding then.

    Raises:
        ShardError: names both modules and layouts.
    """

    def sharding(child: nn.Module) -> ModuleSharding | None:
        return after if child is module else sharding_of(child)

    found = state.caller_of(state.tree.path_of(module))
    callers = [module] if next(module.children(), None) is not None else []
    for caller in [*callers, *([] if found is None else [found[0]])]:
        whole = state.whole_forward(caller)
        if not isinstance(whole, TraceError):
            _Layouts(caller, whole, sharding).follow()


@dataclass(frozen=True)
class _Layout:
    """A layout and its origin."""

    letters: str
    source: str


class _Layouts:
    """Layouts of the values of one forward, as far as determined."""

    def __init__(
        self, caller: nn.Module, whole: Specialization, sharding: Callable[[nn.Module], ModuleSharding | None]
    ) -> None:
        self.caller, self.whole, self.sharding = caller, whole, sharding
        self.own = sharding(caller)
        self.found: dict[fx.Node, _Layout | None] = {}
        propagated = propagate(whole.graph, caller)
        self.dims = {node.fx: propagated.dims.get(node) for node in propagated.nodes}

    def follow(self) -> None:
        """Follow the layouts from node to node.

        Raises:
            ShardError: a module takes another layout than it is given.
        """
        for node in self.whole.graph.nodes:
            if node.op == "placeholder":
                self.found[node] = self.given(node)
            elif node.op == "output":
                self.returned(node)
            elif node.op == "call_module":
                self.found[node] = self.called(node)
            else:
                self.found[node] = self.carried(node, {})

    def given(self, node: fx.Node) -> _Layout | None:
        """Return the layout of an input after the synchronizations of the caller."""
        text, names = self.whole.signature.inputs.get(str(node.target)), input_names(self.caller)
        for key, sync in (self.own.syncs if self.own else {}).items():
            if key.startswith("fwd_pre") and text == (sync.argument or names[0]):
                after = _ends(sync, _rank(node), features_dim(self.caller))[1]
                return None if after is None else _Layout(after, f"fwd_pre of {self.label(self.caller)}")
        return None

    def returned(self, node: fx.Node) -> None:
        sync = self.own.syncs.get("fwd_post") if self.own else None
        values = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
        first = next((each for each in values if isinstance(each, fx.Node) and _rank(each)), None)
        if sync is not None and first is not None:
            self.expect(first, _ends(sync, _rank(first), features_dim(self.caller))[0], self.label(self.caller))

    def called(self, node: fx.Node) -> _Layout | None:
        child, label = self.caller.get_submodule(str(node.target)), str(node.target)
        sharding, given, names = self.sharding(child), dict[fx.Node, _Layout | None](), input_names(child)
        for key, sync in (sharding.syncs if sharding else {}).items():
            name = sync.argument or (names[0] if names else "")
            value = node.kwargs.get(name, node.args[names.index(name)] if name in names[: len(node.args)] else None)
            if isinstance(value, fx.Node) and key.startswith("fwd_pre"):
                before, after = _ends(sync, _rank(value), features_dim(child))
                self.expect(value, before, label)
                given[value] = None if after is None else _Layout(after, f"fwd_pre of {label}")
        after = self.given_by(child, sharding, _rank(node))
        if after is not None:
            return _Layout(after, label)
        silent = sharding is None or not any(key.startswith(OUTPUTS) for key in sharding.syncs)
        whole = sharding is None or not sharding.splits or sharding.role(child) == CHANNEL
        inside = any(is_sharded(each) for each in child.children())
        return self.carried(node, given) if silent and whole and not inside else None

    def given_by(self, child: nn.Module, sharding: ModuleSharding | None, rank: int) -> str | None:
        """Return the layout of the output of ``child`` if its sharding alone determines it."""
        if sharding is None:
            return None
        sync, features = sharding.syncs.get("fwd_post"), features_dim(child)
        if sync is not None:
            return _ends(sync, rank, features)[1]
        return _letters(rank, features) if sharding.role(child) == COLUMN else None

    def expect(self, value: fx.Node, letters: str | None, label: str) -> None:
        """Raise if ``value`` is known to have another layout than ``letters``."""
        known = self.found.get(value)
        if known is not None and letters is not None and known.letters != letters:
            raise ShardError(
                f"{label} starts from {letters}, and {known.source} before it gives {known.letters}",
                where=f"{value.format_node()}\n{value.meta.get('source', '')}".rstrip(),
                fix=f'a resharding "{known.letters}->…", or another one before it',
            )

    def carried(self, node: fx.Node, given: Mapping[fx.Node, _Layout | None]) -> _Layout | None:
        """Return the layout of a result from those of its operands, or None if they do not determine it.

        Args:
            given: layouts of operands inside a module, after its synchronizations.
        """
        tensors = [each for each in node.all_input_nodes if _rank(each)]
        layouts = {each: given.get(each, self.found.get(each)) for each in tensors}
        known = {each: layout for each, layout in layouts.items() if layout is not None}
        sharded = {each: layout for each, layout in known.items() if "S" in layout.letters}
        if not sharded:
            source = next(iter(known.values())).source if known and len(known) == len(tensors) else None
            return None if source is None or not _rank(node) else _Layout("R" * _rank(node), source)
        to = {self.moved(each, layout.letters.index("S"), node) for each, layout in sharded.items()}
        (dim,) = to if len(to) == 1 else (None,)
        return None if dim is None else _Layout(_letters(_rank(node), dim), next(iter(sharded.values())).source)

    def moved(self, operand: fx.Node, dim: int, result: fx.Node) -> int | None:
        """Return the one dimension of ``result`` that is dimension ``dim`` of ``operand``, or None."""
        before, after = self.dims.get(operand), self.dims.get(result)
        if not isinstance(before, list) or not isinstance(after, list):
            return None
        same = [at for at, each in enumerate(after) if _same(each, before[dim])]
        return same[0] if len(same) == 1 else None

    def label(self, module: nn.Module) -> str:
        return "the module that calls it" if module is self.caller else type(module).__name__


def _same(one: Dim, other: Dim) -> bool:
    return bool(factors(one)) and factors(one) == factors(other)


def _rank(node: fx.Node) -> int:
    spec = node.meta.get("spec")
    return spec.ndim if isinstance(spec, TensorSpec) else 0


def _letters(rank: int, dim: int) -> str:
    return "".join("S" if at == dim % rank else "R" for at in range(rank))


def _ends(sync: Sync, rank: int, features: int) -> tuple[str | None, str | None]:
    """Return the layouts before and after a synchronization, None where it does not determine them."""
    if isinstance(sync.op, Resharding):
        return sync.op.before, sync.op.after
    whole, part = "R" * rank, _letters(rank, features if sync.axis is None else sync.axis)
    ends: dict[Any, tuple[str | None, str | None]] = {
        "all_gather": (part, whole),
        "scatter": (whole, part),
        "all_reduce": (None, whole),
        "reduce_scatter": (None, part),
    }
    return ends.get(sync.op, (None, None))
