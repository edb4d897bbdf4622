"""``build``: the last step of a schedule, to materialize tensors on the meta device."""

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
    """Return the scheduled model, ready to use.

    It is the module object that the schedule was created from. Tensors on the meta device are materialized; each rank
    materializes only its own shard of a sharded tensor. All ranks draw the same numbers in the order in which one
    device would, so a seed gives the same weights on any number of ranks: those of
    ``model.to_empty(device="cpu"); torch.manual_seed(seed); model.init_weights()``. Tied weights stay tied, parameters
    stay the same objects. Memory: this rank's shards plus about the largest module.

    Args:
        sch: any schedule of the model.
        init_weights: a function called with each module, children first, like ``nn.Module.apply``, while the tensors
            it writes are not sharded; or a checkpoint to read shards from: a safetensors file, a folder written by
            ``save_pretrained``, or a ``torch.distributed.checkpoint`` folder (all ranks must call ``build`` for
            that). None: transformers' ``_init_weights``, or ``reset_parameters`` of other modules.
        device: the target device; by default the mesh's device, or torch's default device.
        pipeline: how to run the stages of a schedule with :meth:`~schedule.Schedule.cut_pipeline_stage`. The stages
            are on the mesh's dimension ``"pp"``, or on all ranks; all of these ranks must call ``build``. Each rank
            materializes only its own stages of a model on the meta device.

    Returns:
        The model itself; with ``pipeline`` this rank's stages of it.

    Raises:
        NotApplicable: a primitive is still running, a tensor has no initialization, or the checkpoint does not fit; no
            stage was cut, a stage has no parameters, or a cut is inside a loop.
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
    """Materialize the tensors on the meta device in ``part``, a part of ``root`` or ``root`` itself."""
    if not any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        if init_weights is not None:
            raise NotApplicable(
                "init_weights was given and no tensor is on the meta device",
                fix='make the model within torch.device("meta"), or initialize it yourself',
            )
        return
    from schedule.distributed.checkpoint.initialize import initialize
    from schedule.distributed.checkpoint.slots import meta_slots
    from schedule.distributed.checkpoint.stored_values import read_weights

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
    """Replace whole parameters on the meta device by empty ones on ``device``, so undo can gather their shards."""
    for step in sch.history:
        for edit in step.edits:
            whole = getattr(getattr(edit, "tensor", None), "whole", None)
            if isinstance(whole, nn.Parameter) and whole.is_meta:
                empty = nn.Parameter(torch.empty(0, dtype=whole.dtype, device=device), whole.requires_grad)
                vars(empty).update(vars(whole))
                torch.utils.swap_tensors(whole, empty)
