"""``fork_rng``: separate random numbers for each tensor-parallel rank inside a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from schedule.core.edits import WrapCalls
from schedule.core.wrapping import wrappers_of
from schedule.distributed.communication.mesh import tensor_parallel
from schedule.primitives.registry import primitive
from schedule.util.errors import ShardError

if TYPE_CHECKING:
    from schedule.core.node import NodeT


@primitive
def fork_rng(sch: NodeT) -> NodeT:
    """Draw different random numbers on each tensor-parallel rank inside this module.

    ::

        before:  a = self.attn(x)                      # every rank drops the same places of its own heads
        after:   with own random numbers: a = self.attn(x)

    Outside, all ranks still draw the same numbers if they were seeded alike. This applies to torch's default generators
    of the CPU and of the current CUDA device. It also works with activation checkpointing, applied before or after, to
    this module, a submodule or an ancestor. Under ``torch.compile`` the module is a separate graph.

    Raises:
        ShardError: no mesh or process group; forked already.
        NotApplicable: the module is inlined in another module's graph.
    """
    from schedule.distributed.communication.rng import OwnRandomNumbers  # torch.compiler.disable loads dynamo

    tp = tensor_parallel(sch.tree.mesh)
    sch.refuse_inside_other_graph()
    if _is_forked(sch.module):
        raise ShardError(f"{sch.label} draws random numbers of its own already", fix="undo that step first")
    for ancestor, _ in sch.tree.ancestors(sch.path):
        if _is_forked(ancestor):
            raise ShardError(
                f"{sch.tree.path_of(ancestor) or 'the root'}, around it, draws random numbers of its own",
                fix="fork_rng() of one of them is enough: undo that step to fork further inside",
            )
    sch.commit([WrapCalls(sch.tree, sch.module, OwnRandomNumbers(tp.rank), sch.path)])
    return sch


def draws_apart(root: nn.Module) -> bool:
    """Return whether any module of ``root`` draws random numbers of its own on each rank."""
    return any(map(_is_forked, root.modules()))


def _is_forked(module: nn.Module) -> bool:
    from schedule.distributed.communication.rng import OwnRandomNumbers  # torch.compiler.disable loads dynamo

    return any(isinstance(wrapper, OwnRandomNumbers) for wrapper in wrappers_of(module))
