"""What an MLP is built from: interfaces of its parts, and of the functions that build them.

Source: Megatron-LM ``core.transformer.mlp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
Initializer = Callable[[Tensor], Any]


class ProcessGroup(Protocol):
    """What is asked of a tensor-parallel group."""

    def size(self) -> int:
        """Number of ranks."""
        ...


class LinearFc1Interface(Protocol):
    """What the first linear layer, hidden to feed-forward size, has to offer `MLP`."""

    def forward(self, hidden_states: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size]`` to ``[..., output_size]``, and the bias ``[output_size]`` not yet added, or None."""
        ...

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward pass put off; none is nothing to do."""
        ...


class LinearFc2Interface(Protocol):
    """What the second linear layer, feed-forward size to hidden, has to offer `MLP`."""

    def forward(self, hidden_states: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size]`` to ``[..., output_size]``, and the bias ``[output_size]`` not yet added, or None."""
        ...

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward pass put off; none is nothing to do."""
        ...


class TEActivationFunctionInterface(Protocol):
    """An activation that does the gating too."""

    def forward(self, input_: Tensor, /) -> Tensor:
        """``[..., ffn or 2·ffn]`` to ``[..., ffn]``."""
        ...


class LinearFc1Builder(Protocol):
    """Builds the first linear layer: `output_size` is doubled, and `stride` 2, for a gated unit."""

    def __call__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Initializer,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        tp_group: ProcessGroup | None,
        stride: int = 1,
    ) -> LinearFc1Interface: ...


class LinearFc2Builder(Protocol):
    """Builds the second linear layer: its input is the rank's part of the feed-forward size."""

    def __call__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Initializer,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        tp_group: ProcessGroup | None,
    ) -> LinearFc2Interface: ...


class TEActivationFunctionBuilder(Protocol):
    """Builds the activation that stands between the linear layers."""

    def __call__(self, *, config: Any) -> TEActivationFunctionInterface: ...
