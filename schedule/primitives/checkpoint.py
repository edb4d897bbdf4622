"""``checkpoint``: recomputation in the backward pass instead of saved activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from schedule.core import history
from schedule.core.edits import WrapCalls
from schedule.core.matching import Match, named_matches
from schedule.core.wrapping import wrappers_of
from schedule.patterns import GraphMatch
from schedule.primitives.activations import Recomputed, measure_saved
from schedule.primitives.activations.budget import OutOfBudget, choose
from schedule.primitives.callees import Region, region_of
from schedule.primitives.registry import primitive
from schedule.primitives.rewrites import PatternRewrite, Replacement, rewrite_matches
from schedule.util.arguments import refuse_no_count
from schedule.util.errors import NotApplicable
from schedule.util.wording import Bytes, bytes_of

if TYPE_CHECKING:
    from schedule.core.node import Node, NodeT


@primitive
def checkpoint(
    sch: NodeT, matches: Sequence[Match] | str | None = None, every: int = 1, budget: Bytes | None = None
) -> NodeT:
    """Save only the inputs of this module or of matches, and recompute the rest in the backward pass.

    ::

        before:  h = self.h.0(x)                             after:  h = checkpoint(self.h.0, x)
        before:  p = softmax(s);  d = dropout(p);  o = d @ v after:  o = checkpoint(region, s, v)

    Outputs and gradients are bit-identical, also with dropout. Graphs inside stay in use, and further primitives may
    follow. The module's hooks run once.

    Args:
        matches: result of ``find``, or the name of a rule; the parts of the traced graph to recompute. None means the
            whole module.
        every: for a group, members 0, ``every``, 2 × ``every``, …; for matches, each ``every``-th.
        budget: bytes that the model may keep for the backward pass of the recorded inputs: a number, or a text such
            as ``"2GB"``. The modules to recompute
            are chosen among those in this one (for a group, among its members and the modules in them) for the
            least work, by a knapsack on the tree of modules, from the measured bytes of each.

    Raises:
        NotApplicable: checkpointed already, inlined in another module's graph, ``every`` for a single module, or a
            budget that cannot be reached (the error gives the least that can).
        MatchError: as for :meth:`fuse`.
    """
    step = checked_every(every)
    if budget is not None:
        within_budget([sch], matches, every, budget)
    elif matches is not None:
        _checkpoint_matches(sch, named_matches([sch], matches)[::step])
    elif step > 1:
        raise NotApplicable("one module alone is checkpointed or not", fix='sch["h.*"].checkpoint(every=2)')
    else:
        _checkpoint_module(sch)
    return sch


def checked_every(every: Any) -> int:
    """Return ``every`` if it is an integer from 1, else raise."""
    refuse_no_count("every is a number", every, 1, fix="every=2 takes each second one")
    return every


def within_budget(
    members: Sequence[NodeT], matches: Sequence[Match] | str | None, every: int, budget: Bytes
) -> Sequence[NodeT]:
    """Checkpoint ``members`` or modules in them, with the least recomputation to fit ``budget``."""
    if matches is not None or every != 1:
        raise NotApplicable("a budget chooses by itself", fix="give the budget alone")
    limit = bytes_of(budget)
    if limit is None or limit < 0:
        raise NotApplicable(f"a budget is a number of bytes, not {budget!r}", fix='budget="2GB", say')
    tree = members[0].tree
    tree.graphs.calls(members[0].module)  # makes example inputs if none were given
    seen = measure_saved(tree.root, tree.graphs.batch)
    history.reached("after measuring")
    nodes = {node.path: node for member in members for _, node in member.named_schedules() if _can_be(node)}
    try:
        chosen = choose(seen, limit, [path for path in nodes if path])
    except OutOfBudget as error:
        raise NotApplicable(
            f"at least {error.least:,} bytes are saved, whatever is recomputed in "
            f"{', '.join(member.label for member in members[:3])}; the budget is {limit:,}",
            fix=f"a budget from {error.least:,}, smaller inputs, or more modules to choose from",
        ) from None
    for path in chosen:
        _checkpoint_module(nodes[path])
    return members


def _can_be(node: Node) -> bool:
    if any(isinstance(wrapper, Recomputed) for wrapper in wrappers_of(node.module)):
        return False
    return not isinstance(node.module, (nn.ModuleList, nn.ModuleDict)) and node.tree.holder(node.path) is None


def _checkpoint_module(sch: Node) -> None:
    sch.refuse_inside_other_graph()
    if isinstance(sch.module, (nn.ModuleList, nn.ModuleDict)):
        raise NotApplicable(f"a {type(sch.module).__name__} is never called", fix=f'sch["{sch.path}.*"].checkpoint()')
    if any(isinstance(wrapper, Recomputed) for wrapper in wrappers_of(sch.module)):
        raise NotApplicable(f"{sch.label} is checkpointed already", fix="undo that step first")
    sch.commit([WrapCalls(sch.tree, sch.module, Recomputed(), sch.path)])


# -- parts of graphs ------------------------------------------------------------------------------------------


class RecomputedRegion(Region):
    """Part of a graph, recomputed in the backward pass."""

    def __call__(self, *inputs: Any) -> Any:
        return Recomputed()(super().__call__, inputs, {})


def _checkpoint_matches(sch: Node, matches: Sequence[Match]) -> None:
    rewrite_matches(sch, [[match] for match in matches], lambda _, wanted, sizes: Recomputation(wanted))


class Recomputation(PatternRewrite):
    """Each match computed again in the backward pass."""

    def settings(self) -> tuple[Any, ...]:
        """Return nothing: there is one way."""
        return ()

    def replacement(self, graph_match: GraphMatch, module: nn.Module) -> Replacement:
        """Return the match and a checkpointed region."""
        return region_of(graph_match, f"recomputed_{self.name}", RecomputedRegion, module)
