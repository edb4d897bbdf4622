"""``fork_rng``: each tensor-parallel rank draws random numbers of its own inside a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedule.core.edits import WrapCalls
from schedule.core.wrapping import wrappers_of
from schedule.distributed.communication.mesh import tensor_parallel
from schedule.primitives.registry import primitive
from schedule.util.errors import ShardError

if TYPE_CHECKING:
    from schedule.core.node import NodeT


@primitive
def fork_rng(sch: NodeT) -> NodeT:
    """Inside this module each tensor-parallel rank draws random numbers of its own.

    ::

        before:  a = self.attn(x)                      # every rank drops the same places of its own heads
        after:   with own random numbers: a = self.attn(x)

    Outside, all ranks go on drawing the same numbers, as long as they were seeded alike. torch's default generators
    of the CPU and of the current CUDA device are meant. Holds under activation checkpointing, put on before or after,
    in here or further out. Under ``torch.compile`` the module is a graph of its own.

    Raises:
        ShardError: no mesh or process group; forked already.
        NotApplicable: the module is in the middle of another's graph.
    """
    from schedule.distributed.communication.rng import OwnRandomNumbers  # torch.compiler.disable loads dynamo

    tp = tensor_parallel(sch.tree.mesh)
    sch.refuse_inside_other_graph()
    if any(isinstance(wrapper, OwnRandomNumbers) for wrapper in wrappers_of(sch.module)):
        raise ShardError(f"{sch.label} draws random numbers of its own already", fix="undo that step first")
    for ancestor, _ in sch.tree.ancestors(sch.path):
        if any(isinstance(wrapper, OwnRandomNumbers) for wrapper in wrappers_of(ancestor)):
            raise ShardError(
                f"{sch.tree.path_of(ancestor) or 'the root'}, around it, draws random numbers of its own",
                fix="fork_rng() of one of them is enough: undo that step to fork further inside",
            )
    sch.commit([WrapCalls(sch.tree, sch.module, OwnRandomNumbers(tp.rank), sch.path)])
    return sch
