"""``decompose``: a Linear as a matrix product and a bias addition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from schedule.capture import Recording, Specialization, expand, is_projection, original_class
from schedule.core.adapting import Rewritten, adapter_for
from schedule.core.edits import SetSpecializations
from schedule.core.rebinding import keep_erased
from schedule.primitives.registry import primitive
from schedule.util.errors import NotApplicable, TraceError

if TYPE_CHECKING:
    from schedule.core.node import Node, NodeT


@primitive
def decompose(sch: NodeT) -> NodeT:
    """Split a linear layer into a matrix product and a bias addition, in the graph of its caller.

    ::

        before:  y = self.c_fc(x)
        after:   y = F.linear(x, self.c_fc.weight) + self.c_fc.bias

    The parameters and their paths stay the same. The bias can then be fused with the operations that follow. Works
    for ``nn.Linear`` and transformers' ``Conv1D`` (``torch.matmul(x, weight) + bias``).

    Raises:
        NotApplicable: the module is something else, has no bias or has a hook, or no traced graph calls it.
        TraceError: the calling module cannot be traced.
    """
    layer = sch.module
    sch.refuse_inside_other_graph()
    _refuse_other(layer)
    caller, path = _caller(sch)
    opening = Opening(path)
    recording = caller.tree.graphs.recording
    made = [opening.on(each, caller.module, recording)[0] for each in caller.specializations]
    edits = [SetSpecializations(caller.module, made, caller.path, adapter_for(caller, [opening]))]
    caller.commit(edits, 0)
    sch.commit([])
    return sch


def _refuse_other(layer: nn.Module) -> None:
    kind = original_class(layer).__name__
    if not is_projection(layer):
        raise NotApplicable(f"a {kind} is neither a Linear nor a Conv1D", fix="decompose linear layers only")
    if layer.bias is None:
        raise NotApplicable(f"this {kind} has no bias to split off", fix="it is a matrix product already: leave it")
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        raise NotApplicable(f"this {kind} has a hook, which would be swallowed", fix="remove the hook first")


def _caller(sch: Node) -> tuple[Node, str]:
    """Return the nearest ancestor with a forward, if its graph calls this module, and the path from there."""
    tree = sch.tree
    for ancestor, path in tree.ancestors(sch.path):
        if not tree.graphs.calls(ancestor):
            continue  # a container, which has no forward of its own
        node = tree.node(ancestor)
        node.refuse_inside_other_graph()
        if any(n.op == "call_module" and n.target == path for made in node.specializations for n in made.graph.nodes):
            return node, path
        break
    raise NotApplicable(
        f"no graph calls {sch.label}", fix="decompose a layer that the module above it calls in its forward"
    )


@dataclass(frozen=True)
class Opening:
    """Rewrite of the calls of one linear layer as product and addition."""

    path: str

    def on(self, made: Specialization, module: nn.Module, recording: Recording) -> Rewritten:
        """Inline the calls in one graph of the calling module."""
        calls = [node.name for node in made.graph.nodes if node.op == "call_module" and node.target == self.path]
        if not calls:
            return made, {}
        expansion = expand(made, module, recording, calls)
        if self.path not in expansion.inlined:
            raise TraceError(
                f"{self.path} could not be inlined in the graph of the module that calls it",
                fix="remove what hooks or wraps it",
            )
        keep_erased(made.graph, expansion.graph)
        expansion.graph.lint()
        return made.with_graph(expansion.graph, expansion.inlined), {f"decompose({self.path})": len(calls)}
