"""Side effects of traced torch calls, as observed: what a call writes, whether it draws random numbers or may raise.

A graph is analyzed by the names and schemas of its functions (:mod:`schedule.capture.tracing.effects`). A function that
does more than these say is refused, or noted on its node.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fused.torch_internals.modes import DisableTorchFunction
from fused.torch_internals.schemas import is_custom
from fused.torch_internals.tensors import storage_of
from schedule.capture.recording.source import user_line
from schedule.capture.recording.specs import TensorSpec
from schedule.capture.recording.structure import leaves
from schedule.capture.tracing.effects import changed
from schedule.capture.tracing.trace import Trace
from schedule.util.errors import TraceError


def written_tensors(tracer: Trace, node: fx.Node, arguments: Any) -> list[torch.Tensor]:
    """Return the tensors of ``arguments`` that the call of ``node``, evaluated just before, has changed in place.

    Marks a node that draws random numbers, and that of a custom operator, which may; and a node that may raise because
    of data.

    Raises:
        TraceError: it has changed another one than :func:`~schedule.capture.tracing.effects.changed` finds.
    """
    mode, known = tracer.recording.fake_mode, set(changed(node))
    if mode.draws or is_custom(node.target):
        node.meta["draws"] = True
    if mode.raises or _is_indexed_by_tensor(node):
        node.meta["raises"] = True
    if not known and not mode.written:
        return []
    given = [leaf for _, leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
    written = [tensor for tensor in given if tracer.node_of(tensor) in known]
    with DisableTorchFunction():
        hidden = mode.written - {storage_of(tracer.value_of(tensor)) for tensor in written}
        unexpected = [tensor for tensor in given if storage_of(tracer.value_of(tensor)) in hidden]
    if unexpected:
        raise TraceError(
            f"the function {getattr(node.target, '__name__', node.target)} changes what it is given in place (a tensor "
            f"of shape {tuple(unexpected[0].shape)}), which neither its name nor its signature says",
            where=user_line(),
            fix="keep the module that calls it a leaf (`leaves=(…,)`), or use an operator that declares what it writes",
        )
    return written


def _is_indexed_by_tensor(node: fx.Node) -> bool:
    specs = [each.meta.get("spec") for each in node.all_input_nodes[1:]]
    return node.target is operator.getitem and any(isinstance(spec, TensorSpec) for spec in specs)
