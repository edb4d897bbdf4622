"""Rewrite rules: the patterns of a construct, its replacement, and the proof of their equality."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from schedule.capture import TensorSpec
from schedule.patterns import GraphMatch, NormalGraph, OpNode, Pattern, compile_pattern
from schedule.patterns.normalized_nodes import operands
from schedule.util.errors import MatchError
from schedule.util.internal_errors import written_for_users

Build = Callable[[fx.Graph, dict[str, Any], dict[str, Any]], Any]
"""``build(graph, inputs, scalars)`` inserts the replacement and returns its node."""

Judge = Callable[[GraphMatch], str]
"""Returns the reason a match is left alone, or "" if it is not."""

Filter = Callable[[GraphMatch], bool]

Modules = Mapping[str, nn.Module]

Refine = Callable[[GraphMatch, Modules], GraphMatch]
"""Returns a match with more that is known of it, given the modules that its graph calls, by path."""

Form = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

SETS = ("default", "memory", "attention", "inference")
"""Names of sets of rules: all that are profitable on some device; those that save bytes between forward and backward,
some at the cost of time; those that replace eager attention with torch's own; those that fold layers in evaluation.
All but the first are requested by name."""

DEFAULT = ("default", "memory")
"""The sets of most built-in rules."""


def no_reason(graph_match: GraphMatch) -> str:
    """Return "" to accept every match."""
    return ""


def every_match(graph_match: GraphMatch) -> bool:
    """Return True."""
    return True


def _everywhere() -> str:
    return ""


@dataclass(frozen=True)
class Proof:
    """Evidence for a rule changing no result, run by :func:`schedule.rules.prove`.

    Attributes:
        forms: the construct as models write it, each a function of tensors that the rule must match, which returns a
            tensor or several.
        inputs: tensors for a shape and a dtype, in the order of the forms' parameters; the gradients of
            floating-point ones are compared too.
        shapes: shapes to try; ``inputs`` says what a shape means.
        dtypes: dtypes to try. float64 must agree to 1e-12, float32 with a float64 reference to rtol 1.3e-6, and
            16-bit types may be off by 1.1 × the error of the original.
        refused: lookalikes that no pattern of the rule may match.
    """

    forms: tuple[Form, ...]
    inputs: Callable[[tuple[int, ...], torch.dtype], tuple[torch.Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)
    refused: tuple[Form, ...] = ()

    def __post_init__(self) -> None:
        for form in (*self.forms, *self.refused):
            written_for_users(form)


@dataclass(frozen=True, eq=False)
class Rule:
    """Rewrite rule as data.

    Attributes:
        name: unique; reports and ``rules=[...]`` use it.
        family: the family it belongs to, such as ``"bias_activation"``.
        patterns: every form of the construct, as for :func:`compile_pattern`; the larger ones first.
        build: inserts the replacement for a match of any of them.
        proof: see :class:`Proof`.
        summary: the replacement as users read it in a graph.
        about: whether a match concerns the rule; reports omit those that do not.
        extra_check: the reason if a match cannot be rewritten although the pattern fits, else "".
        no_gain: the reason if nothing would be gained at any size, else "".
        profitability: the reason if a match is not profitable, else ""; not checked with ``cost_guard=False``.
        restride: the reason if the first result must be made contiguous, as the construct's is, because its strides
            matter to its readers, else "".
        refine: returns a match with further scalars for ``build``, found in the graph around it; None for none.
        discards: the outputs of a match, by number, that the replacement does not compute.
        bystanders: ``(pattern, reason)`` for code left alone on purpose; a reason may be a function of the match.
        rank: of overlapping matches the one of higher rank is taken, if profitable; among equals, the larger one.
        sets: its sets of :data:`SETS`; a rule in none, as by default, is requested by name, and not in ``"all"``.
        no_gain_here: the reason if it gains nothing on this machine, so that sets leave it out, else "".
        needs: for each pattern, the operations that every match of it has; ``bystander_needs`` likewise.
    """

    name: str
    family: str
    patterns: tuple[Any, ...]
    build: Build
    proof: Proof | None = None
    summary: str = ""
    about: Filter = every_match
    extra_check: Judge = no_reason
    no_gain: Judge = no_reason
    profitability: Judge = no_reason
    restride: Judge = no_reason
    refine: Refine | None = None
    discards: tuple[int, ...] = ()
    bystanders: tuple[tuple[Any, str | Judge], ...] = ()
    rank: int = 0
    sets: tuple[str, ...] = ()
    no_gain_here: Callable[[], str] = _everywhere
    needs: tuple[frozenset[str], ...] = field(init=False, repr=False)
    _telling_bystanders: tuple[frozenset[str], ...] = field(init=False, repr=False)
    bystander_needs: tuple[frozenset[str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.patterns:
            raise MatchError(f"the rule {self.name} has no pattern", fix="give it at least one")
        unknown = [name for name in self.sets if name not in SETS]
        if unknown:
            raise MatchError(f"the rule {self.name} is in no set {unknown[0]!r}", fix=f"sets: {', '.join(SETS)}")
        compiled = tuple(compile_pattern(pattern) for pattern in self.patterns)
        bystanders = tuple((compile_pattern(pattern), reason) for pattern, reason in self.bystanders)
        object.__setattr__(self, "patterns", compiled)
        object.__setattr__(self, "needs", tuple(required_ops(pattern) for pattern in compiled))
        object.__setattr__(self, "bystanders", bystanders)
        object.__setattr__(self, "bystander_needs", tuple(required_ops(pattern) for pattern, _ in bystanders))
        telling = tuple(self._telling(pattern) for pattern, _ in bystanders)
        object.__setattr__(self, "_telling_bystanders", telling)

    def _telling(self, bystander: Pattern) -> frozenset[str]:
        """Return the operations of modules that may contain a bystander.

        What a call of a module computes is not known: what all of the rule's own patterns have stands for it.
        """
        has_calls = any(node.op == "call_module" for node in bystander.digraph)
        inside = frozenset.intersection(*self.needs) if has_calls else frozenset()
        return (required_ops(bystander) | inside) - EVERYWHERE

    def concerns(self, ops: Collection[str]) -> bool:
        """Check whether a module with these operations may contain the construct."""
        return any(need <= set(ops) for need in (*map(_telling_ops, self.needs), *self._telling_bystanders))

    def build_for(self, graph_match: GraphMatch) -> Build:
        """Return what inserts the replacement of ``graph_match``."""
        if not self.restride(graph_match):
            return self.build

        def build(graph: fx.Graph, inputs: dict[str, Any], scalars: dict[str, Any]) -> Any:
            made = self.build(graph, inputs, scalars)
            results = [made] if isinstance(made, fx.Node) else list(made)
            return [graph.call_method("contiguous", (results[0],)), *results[1:]]

        return build

    def prepared(self, graph_match: GraphMatch, module: nn.Module) -> tuple[GraphMatch, Build]:
        """Return the match in a graph of ``module``, refined, and what inserts its replacement."""
        if self.refine is not None:
            graph_match = self.refine(graph_match, dict(module.named_modules(remove_duplicate=False)))
        return graph_match, self.build_for(graph_match)

    def possible(self, normal: NormalGraph) -> Iterator[tuple[Pattern, list[OpNode]]]:
        """Yield the patterns with all of their operations in a graph, each with the nodes of the rarest one."""
        for pattern, ops in zip(self.patterns, self.needs, strict=True):
            found = [normal.by_op.get(op, []) for op in ops]
            if all(found):
                yield pattern, min(found, key=len, default=[])


EVERYWHERE = {"add", "mul", "sub", "div", "matmul", "linear", "getitem", "cast", "to"}
"""Operations that are not characteristic of a module, or that result from inlining its leaf modules."""


def _telling_ops(need: frozenset[str]) -> frozenset[str]:
    """Return those of a pattern's operations that a module with the construct is known by.

    A product may add its bias itself.
    """
    return need - EVERYWHERE or (need - {"add"} if need & {"linear", "matmul"} else need)


def required_ops(pattern: Pattern) -> frozenset[str]:
    """Return the operations present in every match of ``pattern``, for any choice of alternatives."""
    known: dict[OpNode, frozenset[str]] = {}

    def of(node: OpNode) -> frozenset[str]:
        if node not in known:
            if node.op == "choice":
                known[node] = frozenset.intersection(*(below(way) for way in node.args["alternatives"]))
            else:
                own = () if node.op in ("input", "scalar", "call_module") else (node.op,)
                known[node] = below(tuple(node.args.values())).union(own)
        return known[node]

    def below(value: Any) -> frozenset[str]:
        return frozenset().union(*map(of, operands(value)))

    return below(pattern.outputs)


def spec_of(value: Any) -> TensorSpec | None:
    """Return the recorded spec of a bound value, or None if it was not seen or is not a tensor."""
    spec = value.meta.get("spec") if isinstance(value, fx.Node) else None
    if spec is None and hasattr(value, "value") and isinstance(value.value, torch.Tensor):
        spec = TensorSpec.of(value.value)
    return spec if isinstance(spec, TensorSpec) else None
