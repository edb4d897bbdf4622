"""``fuse``: one call per match, of a fused op or of compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from schedule import rules
from schedule.core.matching import Match, Wanted, named_matches
from schedule.patterns import GraphMatch
from schedule.primitives.callees import CompiledRegion, Region, region_of
from schedule.primitives.registry import primitive
from schedule.primitives.rewrites import PatternRewrite, Replacement, checked_name, rewrite_matches
from schedule.util.errors import NotApplicable

if TYPE_CHECKING:
    from schedule.core.node import NodeT

Compiler = Literal["auto", "inductor"]


@primitive
def fuse(
    sch: NodeT, matches: Sequence[Match] | str, compiler: Compiler | None = "auto", name: str | None = None
) -> NodeT:
    """Replace each match by one call, of a rule's fused op or of the same operations compiled.

    ::

        before:  y = F.linear(x, self.c_fc.weight);  z = F.gelu(y + self.c_fc.bias, approximate="tanh")
        after:   y = F.linear(x, self.c_fc.weight);  z = bias_gelu(y, self.c_fc.bias)

    Parameters keep their paths. Training, eval and every recorded signature are rewritten together.
    Afterwards ``sch.history[-1].replaced`` has the nodes that were replaced.

    Args:
        matches: result of ``find``, or the name of a rule: ``fuse("bias_gelu_tanh")`` fuses all of its matches.
        compiler: ``"auto"`` takes the registered fused op if any rule matches the same operations, else
            ``"inductor"``: the matched part is compiled by ``torch.compile`` at its first call, with dynamic
            shapes, or runs uncompiled without a compiler. None only makes it one call.
        name: name of the new node in the graph, and of the compiled function; by default those of the op or the
            pattern. Further calls in one graph get a number: ``FusedLN``, ``FusedLN_1``.

    Raises:
        MatchError: a match is of another model, consumed already (gives the primitive), or unsafe: an
            interior value is used outside, operations would change order, or a hook would be bypassed.
        NotApplicable: no matches; an unknown compiler; ``name`` is no identifier; or the module is inlined in another
            module's graph.
    """
    if compiler not in ("auto", "inductor", None):
        raise NotApplicable(f"there is no compiler {compiler!r}", fix='"auto", "inductor" or None')
    node_name = checked_name(name)
    groups = [[match] for match in named_matches([sch], matches)]
    rewrite_matches(sch, groups, lambda _, wanted, sizes: Fusion(wanted, compiler, node_name))
    return sch


class Fusion(PatternRewrite):
    """Rewrite of each match to one call: of the fused op of a rule, or of the same operations compiled."""

    def __init__(self, wanted: Wanted, compiler: Compiler | None, node_name: str = "") -> None:
        super().__init__(wanted, node_name=node_name)
        self.compiler = compiler

    def settings(self) -> tuple[Any, ...]:
        """Return the compiler and the name of the nodes."""
        return self.compiler, self.node_name

    def replacement(self, graph_match: GraphMatch, module: nn.Module) -> Replacement:
        """Return the match as the rule sees it with the rule's build, else a region."""
        rule = self.wanted.rule if self.compiler == "auto" else None
        if rule is not None:
            return rule.prepared(graph_match, module)
        seen = rules.rule_at(graph_match) if self.compiler == "auto" else None
        if seen is not None:
            return seen[0].prepared(seen[1], module)
        kind = Region if self.compiler is None else CompiledRegion
        return region_of(graph_match, self.node_name or self.name, kind, module)
