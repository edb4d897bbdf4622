"""``cut_pipeline_stage``: where one stage of a pipeline ends and the next begins."""

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
    """A stage of the pipeline ends after this module; ``schedule.build(sch, pipeline=…)`` makes the stages.

    ::

        before:  h5 = self.h.5(h4);  h6 = self.h.6(h5);  h7 = self.h.7(h6)
        after:   h5 = self.h.5(h4);  h6 = self.h.6(h5)  |  h7 = self.h.7(h6)

    The module may be nested: the forwards of those around it are traced down to it. The model itself does not change.

    Raises:
        NotApplicable: the root, a module that is never called, one inside another's graph, or cut already.
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
