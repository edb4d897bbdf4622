"""Modules of single pipeline stages, with submodule names as in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from fused import MakeViewlessTensor
from schedule.capture import Specialization, closing_regions, compiled, leaves, original_class
from schedule.distributed.pipeline.splitting import StageGraph, state_of_stages
from schedule.runtime.scheduled import ScheduledState
from schedule.util.errors import NotApplicable

Modes = Mapping[bool, tuple[Specialization, Sequence[StageGraph]]]
"""Training flag → (the whole forward, its stages)."""


class Stage(nn.Module):
    """Module of one pipeline stage.

    Args:
        whole: the model, as the owner of the stage's submodules and tensors, and for flags and settings.
        modes: the forward in training and in evaluation mode.
        index: index of the stage.
    """

    def __init__(self, whole: nn.Module, modes: Modes, index: int) -> None:
        super().__init__()
        self._whole, self._index = [whole], index
        self._modes = {training: (made, stages[index]) for training, (made, stages) in modes.items()}
        self._is_last = all(index == len(stages) - 1 for _, stages in modes.values())
        self._runs = {training: compiled(stage.graph) for training, (_, stage) in self._modes.items()}
        self._select = {
            training: ScheduledState(original_class(whole), [made], "").select
            for training, (made, _) in self._modes.items()
        }
        self._returned: list[str] = []
        self._shapes_only = False
        self._parts = [state_of_stages(whole, [stage for _, stage in self._modes.values()])]
        attach_all(self, self.parts)

    @property
    def index(self) -> int:
        """Index of the stage."""
        return self._index

    @property
    def parts(self) -> Mapping[str, Any]:
        """Modules and tensors of the whole model in this stage, by path."""
        return self._parts[0]

    @property
    def returned(self) -> Sequence[str]:
        """Names of the tensors returned by the last stage, such as ``loss``, or nothing before its first forward."""
        return self._returned

    def forward(self, *received: Tensor, **batch: Any) -> Tensor | tuple[Tensor, ...]:
        """Run one microbatch.

        Args:
            received: tensors sent by the previous stage.
            batch: arguments of the whole model.

        Raises:
            NotApplicable: the arguments do not match the example inputs, or there is no graph for the current mode.
        """
        if self.training not in self._modes:
            raise NotApplicable("the forward could not be traced in this mode", fix="see sch.trace()")
        made, stage = self._modes[self.training]
        selected = self._select[self.training](self._whole[0], (), batch)
        if selected is None:
            looks = ", ".join(f"{name}: {_kind(value)}" for name, value in batch.items())
            raise NotApplicable(
                f"this batch differs from the example inputs that the stages were made for: {looks}",
                fix="create_schedule(model, batch=batch) with a batch like those to come",
            )
        inputs = dict(zip(made.signature.inputs, selected[1][1:], strict=True))
        with ExitStack() as block:
            block.enter_context(closing_regions())
            if self._shapes_only:
                block.enter_context(_unchanged(self.buffers()))
                for tensor in received:
                    tensor.data.zero_()  # uninitialized: it may be no index of anything
            result = self._runs[self.training](self, *_answering(received), *(inputs[name] for name in stage.inputs))
        return self._flat(result) if self._is_last else tuple(map(_sendable, result))

    def _flat(self, result: Any) -> tuple[Tensor, ...]:
        named = [
            (".".join(str(key) for _, key in path), leaf) for path, leaf in leaves(result) if isinstance(leaf, Tensor)
        ]
        self._returned = [name for name, _ in named]
        return tuple(leaf.reshape(1) if leaf.ndim == 0 else leaf for _, leaf in named)


@contextmanager
def shapes_only(stages: Iterable[Stage], value: bool = True) -> Iterator[None]:
    """Tell ``stages`` whether calls in the block are only about shapes, which torch learns by a first call."""
    before = [(stage, stage._shapes_only) for stage in stages]
    for stage, _ in before:
        stage._shapes_only = value
    try:
        yield
    finally:
        for stage, each in before:
            stage._shapes_only = each


@contextmanager
def _unchanged(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Restore ``buffers`` after the block; through ``data``, since the backward pass may have saved them."""
    saved = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.data.copy_(value)


class _Answering(torch.autograd.Function):
    """Autograd function to return the same data, with gradients for all tensors if there is one for any of them."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _answering(received: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return ``received`` with zeros as gradients of what is not read: torch 2.11 does not send missing gradients."""
    waited_for = [tensor for tensor in received if tensor.requires_grad]
    if not waited_for:
        return received
    answered = dict(zip(map(id, waited_for), _Answering.apply(*waited_for), strict=True))
    return [answered.get(id(tensor), tensor) for tensor in received]


def _sendable(tensor: Tensor) -> Tensor:
    """Return a separate tensor object with the same data, to be freed without affecting saved tensors."""
    tensor = tensor.contiguous()
    if not tensor.requires_grad:
        return tensor.detach()
    made: Tensor = MakeViewlessTensor.apply(tensor, True)
    return made


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def attach_all(container: nn.Module, parts: Mapping[str, Any]) -> None:
    """Register modules and tensors in ``container`` at their paths."""
    for path, part in sorted(parts.items(), key=lambda item: item[0].count(".")):
        *above, name = path.split(".")
        owner = container
        for step in above:
            if step not in owner._modules:
                owner._modules[step] = nn.Module()
            owner = owner._modules[step]  # type: ignore[assignment]
        if isinstance(part, nn.Module):
            owner._modules[name] = part
        elif isinstance(part, nn.Parameter):
            owner._parameters[name] = part
        elif name not in owner._buffers:
            owner.register_buffer(name, part)


class SendingStage(PipelineStage):
    """A ``PipelineStage`` freeing the data of its outputs after sending.

    The backward pass needs only their autograd graph.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # weak, since outputs for a stage on the same rank are not sent
        self._unsent: dict[int, list[ReferenceType[Tensor]]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch, and remember its outputs."""
        stage: Any = self.submod
        with shapes_only([stage], False):
            outputs = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._unsent[fwd_chunk_id] = [ref(output) for output in outputs]
        return outputs

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the send operations of one microbatch, and free the data of the outputs.

        The operations keep the data alive until it is sent.
        """
        ops: list[dist.P2POp] = super().get_fwd_send_ops(fwd_chunk_id)
        outputs = [output() for output in self._unsent.pop(fwd_chunk_id)]
        if ops:
            for op in ops:
                op.tensor = op.tensor.detach()  # torch 2.11 sends the outputs themselves
            for output in outputs:
                if type(output) is Tensor:
                    output.data = torch.empty((), dtype=output.dtype, device=output.device).expand(output.shape)
        return ops
