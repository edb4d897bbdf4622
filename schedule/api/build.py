"""``build``: the last step of a schedule, where tensors on the meta device get their data."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from schedule.util.errors import NotApplicable, ScheduleError, located

if TYPE_CHECKING:
    from schedule.core.node import Node
    from schedule.distributed.pipeline.pipeline import Pipeline, PipelinedModel

Weights = Callable[[nn.Module], Any] | str | os.PathLike[str]


@overload
def build(
    sch: Node, init_weights: Weights | None = None, device: torch.device | str | None = None, pipeline: None = None
) -> nn.Module: ...
@overload
def build(
    sch: Node,
    init_weights: Weights | None = None,
    device: torch.device | str | None = None,
    *,
    pipeline: Pipeline,
) -> PipelinedModel: ...


def build(
    sch: Node,
    init_weights: Weights | None = None,
    device: torch.device | str | None = None,
    pipeline: Pipeline | None = None,
) -> nn.Module:
    """The scheduled model, ready to use: the same object that the schedule was made of.

    What is on the meta device gets its data; of what is sharded, each rank's share only. All ranks draw the same
    numbers in the order in which one device would, so a seed gives the same weights on any number of ranks: those of
    ``model.to_empty(device="cpu"); torch.manual_seed(seed); model.init_weights()``. Tied weights stay tied, parameters
    stay the same objects. Memory: this rank's share and about the largest module.

    Args:
        sch: any schedule of the model.
        init_weights: a function called with each module, children first, as ``nn.Module.apply`` does, while what it
            writes is whole; or a checkpoint to read shares from: a safetensors file, a folder that
            ``save_pretrained`` wrote, or one of ``torch.distributed.checkpoint`` (with that, all ranks must call).
            None: transformers' ``_init_weights``, or ``reset_parameters`` of other modules.
        device: where to; the mesh's, or torch's default device.
        pipeline: for a schedule with :meth:`~schedule.Schedule.cut_pipeline_stage`: how its stages run. They are on
            the mesh's dimension ``"pp"``, or on all ranks, which must all call. Of a model on the meta device each
            rank materializes its own stages.

    Returns:
        The model itself; with ``pipeline`` this rank's stages of it.

    Raises:
        NotApplicable: a primitive is still running, nothing initializes a tensor, or the checkpoint does not fit; no
            stage was cut, one has no parameters, or a cut is inside a loop.
        ShardError: a pipeline without a process group, or on a mesh without the dimension ``"pp"``.
    """
    with located("build", sch.label):
        pending = sch.tree.history.pending
        if pending is not None:
            raise NotApplicable(f"{pending.description} is still running", fix="build afterwards")
        root = sch.root.module
        where = torch.device(device) if device is not None else _device_of(sch)
        stages = None if pipeline is None else _stages(sch, pipeline, where)
        materialize(root, init_weights, where, root if stages is None else stages)
        _undoable(sch, where)
        return root if stages is None else stages


def _stages(sch: Node, pipeline: Pipeline, device: torch.device) -> PipelinedModel:
    from schedule.distributed.pipeline.pipeline import PipelinedModel

    return PipelinedModel(sch, pipeline, device)


def materialize(root: nn.Module, init_weights: Weights | None, device: torch.device, part: nn.Module) -> None:
    """Give what is on the meta device its data, if anything is: of ``root``, what ``part`` holds."""
    if not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        if init_weights is not None:
            raise NotApplicable(
                "init_weights was given and no tensor is on the meta device",
                fix='make the model within torch.device("meta"), or initialize it yourself',
            )
        return
    from schedule.distributed.checkpoint.initialize import initialize
    from schedule.distributed.checkpoint.reading import read_weights
    from schedule.distributed.checkpoint.slots import meta_slots

    slots = meta_slots(root)
    own = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
    if isinstance(init_weights, (str, os.PathLike)):
        read_weights(root, [slot for slot in slots if id(slot.tensor) in own], init_weights, device)
    elif init_weights is None or callable(init_weights):
        initialize(root, slots, init_weights, device, own)
    else:
        raise ScheduleError(
            f"init_weights is a function or a path, not {type(init_weights).__name__}",
            fix="build(sch, init_weights=function)",
        )


def _device_of(sch: Node) -> torch.device:
    kind = getattr(sch.mesh, "device_type", None) or torch.get_default_device().type
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device("cpu" if kind == "meta" else kind)


def _undoable(sch: Node, device: torch.device) -> None:
    """Shards made on the meta device can be undone: the whole tensors that they came from get a place for data."""
    for step in sch.history:
        for edit in step.edits:
            whole = getattr(getattr(edit, "tensor", None), "whole", None)
            if isinstance(whole, nn.Parameter) and whole.is_meta:
                empty = nn.Parameter(torch.empty(0, dtype=whole.dtype, device=device), whole.requires_grad)
                vars(empty).update(vars(whole))
                torch.utils.swap_tensors(whole, empty)
