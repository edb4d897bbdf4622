"""Pipeline parallelism for scheduled models, on ``torch.distributed.pipelining``.

Every rank passes the whole batch to ``step``, which splits it into microbatches. A stage sends only the tensors that
later stages need. After sending, it frees their data and keeps the autograd graph (Megatron-LM's
``deallocate_output_tensor``). The gradients of weights shared by several stages are summed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from schedule.capture import is_hooked, original_class
from schedule.distributed.communication.agreement import check_same
from schedule.distributed.pipeline.splitting import on_device, split, state_of_stages
from schedule.distributed.pipeline.stages import Modes, SendingStage, Stage, attach_all, shapes_only
from schedule.distributed.pipeline.tied import TiedGradients
from schedule.runtime.scheduled import state_of
from schedule.util.errors import NotApplicable, ShardError

if TYPE_CHECKING:
    from schedule.core.node import Node

PIPELINE = "pp"


@dataclass(frozen=True)
class Pipeline:
    """Settings of a pipeline.

    Attributes:
        microbatches: number of parts a batch is split into, along the first dimension of its tensors.
        schedule: a schedule of ``torch.distributed.pipelining``: ``"gpipe"``, ``"1f1b"``, ``"interleaved1f1b"``, ….
        loss: ``loss(outputs, target)`` of one microbatch, where ``outputs`` are the tensors that the model returns;
            None uses the loss returned by the model itself, as transformers models do when they get labels.
    """

    microbatches: int
    schedule: str = "1f1b"
    loss: Callable[[tuple[Tensor, ...], Any], Tensor] | None = None


@dataclass(frozen=True)
class PipelineRanks:
    """The ranks of one pipeline.

    Attributes:
        group: their process group.
        size: number of ranks.
        rank: position of this rank in the pipeline.
        lines: global ranks of every such pipeline of the job.
    """

    group: Any
    size: int
    rank: int
    lines: Sequence[Sequence[int]]

    @staticmethod
    def of(mesh: Any) -> PipelineRanks:
        """Return the ranks of the dimension ``"pp"`` of ``mesh``, of its only dimension, or all ranks without a mesh.

        Raises:
            ShardError: there is no process group, or no such dimension.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise ShardError(
                "the process group is not initialized",
                fix="start with torchrun and call torch.distributed.init_process_group first",
            )
        if mesh is None:
            world = dist.get_world_size()
            return PipelineRanks(dist.group.WORLD, world, dist.get_rank(), [list(range(world))])
        names = mesh.mesh_dim_names or ()
        if PIPELINE not in names and mesh.ndim != 1:
            raise ShardError(f'no dimension of the mesh is named "pp": {names}', fix='mesh_dim_names=("pp", "tp")')
        dim = names.index(PIPELINE) if PIPELINE in names else 0
        lines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        return PipelineRanks(mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim), lines)

    def check_same(self, sch: Node, pipeline: Pipeline) -> None:
        """Compare cuts and settings across the ranks. They would wait for each other otherwise.

        Raises:
            ShardError: a rank has others, or does not call this in time.
        """
        steps = [f"cut_pipeline_stage after {sch.tree.path_of(module)}" for module in sch.tree.stage_ends]
        steps.append(f"build with {pipeline.microbatches} microbatches in {pipeline.schedule}")
        check_same(f"pipeline {self.group.group_name}", {"steps": steps}, dist.get_process_group_ranks(self.group))


@dataclass(frozen=True)
class Output:
    """Result of one batch, empty on ranks without the last stage.

    Attributes:
        loss: mean over the microbatches.
        tensors: tensors returned by the model, by name; scalars have one entry per microbatch.
    """

    loss: Tensor | None
    tensors: dict[str, Tensor]


class PipelinedModel(nn.Module):
    """This rank's pipeline stages, with the parameter and ``state_dict`` names of the whole model.

    Made by ``schedule.build(sch, pipeline=Pipeline(microbatches=8))``::

        output = model.step(input_ids=ids, labels=labels)      # forward and backward
        optimizer.step()
    """

    def __init__(self, sch: Node, pipeline: Pipeline, device: torch.device) -> None:
        super().__init__()
        self._whole, self._settings = [sch.root.module], pipeline
        self._ranks = PipelineRanks.of(sch.mesh)
        self._ranks.check_same(sch, pipeline)
        self._modes = _split(sch, device)
        self.count = len(next(iter(self._modes.values()))[1])
        _check(pipeline, self.count, self._ranks)
        self._stages = [
            Stage(self.whole, self._modes, index) for index in range(self._ranks.rank, self.count, self._ranks.size)
        ]
        self.tied = TiedGradients(
            [self._parameters_of(i) for i in range(self.count)], self._ranks.size, self._ranks.lines
        )
        self._runner: Any = None
        self._has_target = False
        self._device = device
        for stage in self._stages:
            attach_all(self, stage.parts)

    @property
    def whole(self) -> nn.Module:
        """The whole scheduled model, with data only for this rank's stages if created on the meta device."""
        return self._whole[0]

    @property
    def stages(self) -> Sequence[Stage]:
        """This rank's stages in order, with indices ``rank``, ``rank + ranks``, …."""
        return tuple(self._stages)

    def _parameters_of(self, index: int) -> list[nn.Parameter]:
        found: dict[nn.Parameter, None] = {}
        for part in state_of_stages(self.whole, [stages[index] for _, stages in self._modes.values()]).values():
            if isinstance(part, nn.Module):
                found |= dict.fromkeys(part.parameters())
            elif isinstance(part, nn.Parameter):
                found[part] = None
        return list(found)

    def train(self, mode: bool = True) -> PipelinedModel:
        """Set the mode of this module, its stages, and the whole model, since the graphs read the model's flags."""
        self.whole.train(mode)
        for stage in self._stages:
            stage.train(mode)
        return super().train(mode)

    def step(self, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Output:
        """Run forward and backward of a batch.

        All ranks of the pipeline must call this with the same batch. The gradients of the mean of the microbatches'
        losses are added to the existing gradients.

        Args:
            args: arguments of the model, like ``kwargs``; tensors are split along their first dimension.
            target: passed to the pipeline's ``loss``, microbatch by microbatch; None if there is none.

        Raises:
            NotApplicable: the batch cannot be split evenly, or does not match the example inputs.
        """
        with self.tied.summed():
            return self._run("step", args, kwargs, target)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Tensor | None = None, **kwargs: Any) -> Output:
        """Run the forward of a batch without gradients."""
        return self._run("eval", args, kwargs, target)

    def _run(self, how: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor | None) -> Output:
        batch = self._by_name(args, kwargs)
        parts = self._settings.microbatches
        for name, value in batch.items():
            if isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] % parts):
                raise NotApplicable(
                    f"{name} is {list(value.shape)}: it cannot be cut into {parts} microbatches",
                    fix=f"give batches whose rows are a multiple of {parts}, or Pipeline(microbatches=…)",
                )
        if self._runner is None:
            self._runner = self._made_runner()
        losses: list[Tensor] = []
        given, self._has_target = torch.zeros(parts) if target is None else target, target is not None
        with shapes_only(self._stages):  # but for the microbatches
            outputs = getattr(self._runner, how)(target=given, losses=losses, **batch)
        last = self._stages[-1]
        if outputs is None or self.count - 1 != last.index:
            return Output(None, {})
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = torch.stack([each.detach() for each in losses]).sum() if losses else None
        return Output(loss, dict(zip(last.returned, outputs, strict=True)))

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.signature(original_class(self.whole).forward)
        try:
            bound = signature.bind(self.whole, *args, **kwargs).arguments
        except TypeError as error:
            raise NotApplicable(f"the model is called with other arguments: {error}", fix=f"{signature}") from error
        others = [name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD]
        named = {name: value for name, value in list(bound.items())[1:] if name not in others}
        return named | {name: value for each in others for name, value in bound.get(each, {}).items()}

    def _made_runner(self) -> Any:
        stages = [
            SendingStage(stage, stage.index, self.count, self._device, group=self._ranks.group)
            for stage in self._stages
        ]
        kind = get_schedule_class(self._settings.schedule)
        given: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        return kind(given, self._settings.microbatches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, outputs: Any, target: Any) -> Tensor:
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        names = self._stages[-1].returned
        if self._settings.loss is not None:
            loss = self._settings.loss(outputs, target if self._has_target else None)
        elif "loss" in names:
            loss = outputs[names.index("loss")].sum()
        elif torch.is_grad_enabled():
            raise NotApplicable(
                f"the model returns {', '.join(names)} and no loss",
                fix="give labels with the example inputs and the batch, or Pipeline(loss=function)",
            )
        else:
            loss = outputs[0].new_zeros(())
        return loss / self._settings.microbatches


def _split(sch: Node, device: torch.device) -> Modes:
    """Trace the whole forward and split it into stages, in each traceable mode."""
    root, tree = sch.root, sch.tree
    cuts = [tree.path_of(module) for module in tree.stage_ends]
    if not cuts:
        raise NotApplicable("no stage was cut", fix='sch["h.5"].cut_pipeline_stage() first')
    if state_of(root.module) is not None:
        raise NotApplicable("the root runs a graph of its own already", fix="cut before the root is rewritten")
    above = {".".join(parts[:depth]) for parts in (path.split(".") for path in cuts) for depth in range(1, len(parts))}
    rewritten = [path for path in sorted(above) if state_of(root.module.get_submodule(path)) is not None]
    if rewritten:
        raise NotApplicable(f"{rewritten[0]}, around a cut, was rewritten already", fix="fuse inside the stages only")
    hooked = [path for path in sorted(above) if is_hooked(root.module.get_submodule(path))]
    if hooked:
        raise NotApplicable(f"{hooked[0]}, around a cut, has a hook, which would be swallowed", fix="remove the hook")
    made = tree.graphs.trace(root.module, lambda module, path: path in above)
    wrong = tree.graphs.check({root.module: made})
    if wrong:
        raise wrong[root.module]
    modes: dict[bool, Any] = {}
    for each in made:
        if each.training not in modes:
            here = on_device(each, device)
            modes[each.training] = here, split(here.graph, cuts, root.module)
    return modes


def _check(pipeline: Pipeline, count: int, ranks: PipelineRanks) -> None:
    if pipeline.microbatches < 1:
        raise NotApplicable(
            f"a batch cannot be cut into {pipeline.microbatches} microbatches", fix="Pipeline(microbatches=4), say"
        )
    try:
        several = issubclass(get_schedule_class(pipeline.schedule), PipelineScheduleMulti)
    except ValueError as error:
        raise NotApplicable(str(error), fix='"gpipe", "1f1b" or "interleaved1f1b"') from None
    if count % ranks.size or (not several and count != ranks.size):
        need = f"a multiple of {ranks.size}" if several else f"{ranks.size}"
        raise NotApplicable(
            f"{pipeline.schedule} on {ranks.size} ranks needs {need} stages, there are {count}",
            fix=f"cut {'more or fewer' if several else ranks.size - 1} times",
        )
