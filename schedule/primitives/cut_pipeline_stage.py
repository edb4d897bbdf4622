"""``cut_pipeline_stage``: boundaries between pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from schedule.core.edits import SetItem
from schedule.primitives.registry import primitive
from schedule.util.errors import NotApplicable

if TYPE_CHECKING:
    from schedule.core.node import NodeT


@primitive
def cut_pipeline_stage(sch: NodeT) -> NodeT:
    """End a pipeline stage after this module.

    ::

        before:  h5 = self.h.5(h4);  h6 = self.h.6(h5);  h7 = self.h.7(h6)
        after:   h5 = self.h.5(h4);  h6 = self.h.6(h5)  |  h7 = self.h.7(h6)

    ``schedule.build(sch, pipeline=…)`` makes the stages. The module may be nested: the forwards of its ancestors are
    traced down to it. The model itself does not change.

    Raises:
        NotApplicable: the root, a module that is never called, one inlined in another's graph, or cut already.
    """
    if not sch.path:
        raise NotApplicable("the last stage ends with the root anyway", fix="cut after a module inside")
    if isinstance(sch.module, (nn.ModuleList, nn.ModuleDict)):
        raise NotApplicable(f"a {type(sch.module).__name__} is never called", fix=f'cut after sch["{sch.path}.0"], say')
    sch.refuse_inside_other_graph()
    cuts = sch.tree.stage_ends
    if sch.module in cuts:
        raise NotApplicable(f"a stage ends after {sch.label} already", fix="undo that step first")
    sch.commit([SetItem(lambda: cuts, sch.module, True)])
    return sch
