"""A rewrite rule: where a construct occurs, what goes in its place, and the proof that both are the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from schedule.capture.recording.specs import TensorSpec
from schedule.patterns import GraphMatch, NormalGraph, OpNode, Pattern, compile_pattern
from schedule.patterns.values import operands
from schedule.util.errors import MatchError
from schedule.util.moved import renamed_fields

Build = Callable[[fx.Graph, dict[str, Any], dict[str, Any]], Any]
"""``build(graph, inputs, scalars)`` inserts the replacement and returns its node."""

Judge = Callable[[GraphMatch], str]
"""Why a match is left alone; "" if it is not."""

Filter = Callable[[GraphMatch], bool]

Form = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

SETS = ("default", "memory", "attention")
"""Names for several rules: all that pay on some device; those that save bytes between forward and backward, some of
them for time; those that put torch's own attention in place of eager attention. The last two are asked for by name."""


def no_reason(graph_match: GraphMatch) -> str:
    """Every match will do."""
    return ""


def _every(graph_match: GraphMatch) -> bool:
    return True


def _everywhere() -> str:
    return ""


@dataclass(frozen=True)
class Proof:
    """What shows that a rule changes no result; :func:`schedule.rules.prove` runs it.

    Attributes:
        forms: the construct as models write it, each a function of tensors that the rule must match, which returns a
            tensor or several.
        inputs: tensors for a shape and a dtype, in the order of the forms' parameters; those of floating point
            are compared by gradient too.
        shapes: shapes to try; ``inputs`` says what a shape means.
        dtypes: dtypes to try. float64 must agree to 1e-12, float32 with a float64 reference to rtol 1.3e-6, and
            16-bit types may be off by 1.1 × what the original is off.
        refused: lookalikes that no pattern of the rule may match.
    """

    forms: tuple[Form, ...]
    inputs: Callable[[tuple[int, ...], torch.dtype], tuple[torch.Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)
    refused: tuple[Form, ...] = ()


@renamed_fields(objection="extra_check", futile="no_gain", thrift="profitability", idle="no_gain_here")
@dataclass(frozen=True, eq=False)
class Rule:
    """A rewrite as data.

    Attributes:
        name: unique; reports and ``rules=[...]`` use it.
        family: what it belongs to, such as ``"bias_activation"``.
        patterns: every way the construct is written, as for :func:`compile_pattern`; the larger ones first.
        build: inserts the replacement for a match of any of them.
        proof: see :class:`Proof`.
        summary: the replacement as users read it in a graph.
        about: whether a match is any business of the rule; reports are silent about those that are none.
        objection: why a match cannot be rewritten though it looks alike.
        futile: why nothing would be gained, whatever its size.
        thrift: why a match would not pay; not asked with ``cost_guard=False``.
        discards: the outputs of a match, by number, that the replacement does not compute.
        bystanders: ``(pattern, reason)`` for code that is left alone on purpose; a reason may look at the match.
        rank: of overlapping matches the one of higher rank is taken, if it pays; among equals, the larger one.
        sets: the ones of :data:`SETS` that it belongs to; a rule of none is asked for by name, and not in ``"all"``.
        idle: why it gains nothing on this machine, so that sets leave it out; "" if it does gain.
        needs: for each pattern, the operations that every match of it has; ``bystander_needs`` likewise.
    """

    name: str
    family: str
    patterns: tuple[Any, ...]
    build: Build
    proof: Proof | None = None
    summary: str = ""
    about: Filter = _every
    extra_check: Judge = no_reason
    no_gain: Judge = no_reason
    profitability: Judge = no_reason
    discards: tuple[int, ...] = ()
    bystanders: tuple[tuple[Any, str | Judge], ...] = ()
    rank: int = 0
    sets: tuple[str, ...] = ("default", "memory")
    no_gain_here: Callable[[], str] = _everywhere
    needs: tuple[frozenset[str], ...] = field(init=False, repr=False)
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

    def concerns(self, ops: Collection[str]) -> bool:
        """Whether a module that computes these operations may hold the construct."""
        telling = [need - EVERYWHERE or need - {"add"} for need in self.needs]
        return any(need <= set(ops) for need in (*telling, *(n - EVERYWHERE for n in self.bystander_needs)))

    @property
    def depends_on_machine(self) -> bool:
        """Whether a set may hold it on one machine and not on another."""
        return self.no_gain_here is not _everywhere

    def possible(self, normal: NormalGraph) -> Iterator[tuple[Pattern, list[OpNode]]]:
        """The patterns whose operations all occur in a graph, each with the nodes of the rarest of them."""
        for pattern, ops in zip(self.patterns, self.needs, strict=True):
            found = [normal.by_op.get(op, []) for op in ops]
            if all(found):
                yield pattern, min(found, key=len, default=[])


EVERYWHERE = {"add", "mul", "sub", "div", "matmul", "linear", "getitem", "cast", "to"}
"""Operations that tell nothing about a module, or that come about by opening its leaf modules."""


def required_ops(pattern: Pattern) -> frozenset[str]:
    """The operations that every match of ``pattern`` has, whichever alternatives it takes."""
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
    """How a bound value looked in the recorded run; None if it was not seen or is no tensor."""
    spec = value.meta.get("spec") if isinstance(value, fx.Node) else None
    if spec is None and hasattr(value, "value") and isinstance(value.value, torch.Tensor):
        spec = TensorSpec.of(value.value)
    return spec if isinstance(spec, TensorSpec) else None
