"""Interfaces of the parts of an MLP, and of their builders.

Source: Megatron-LM ``core.transformer.mlp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Tensor = torch.Tensor
Initializer = Callable[[Tensor], Any]


class ProcessGroup(Protocol):
    """Interface of a tensor-parallel group."""

    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def rank(self) -> int:
        """Return the index of this rank."""
        ...


class LinearFc1Interface(Protocol):
    """Interface of the first linear layer of `MLP`, hidden to feed-forward size."""

    def forward(self, hidden_states: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Map ``[..., input_size]`` to ``[..., output_size]``, and return the bias ``[output_size]`` unless added."""
        ...

    def backward_dw(self) -> None:
        """Compute the weight gradients deferred by the backward pass, if any."""
        ...


class LinearFc2Interface(Protocol):
    """Interface of the second linear layer of `MLP`, feed-forward size to hidden."""

    def forward(self, hidden_states: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Map ``[..., input_size]`` to ``[..., output_size]``, and return the bias ``[output_size]`` unless added."""
        ...

    def backward_dw(self) -> None:
        """Compute the weight gradients deferred by the backward pass, if any."""
        ...


class TEActivationFunctionInterface(Protocol):
    """Interface of an activation including the gating."""

    def forward(self, input_: Tensor, /) -> Tensor:
        """Map ``[..., ffn or 2·ffn]`` to ``[..., ffn]``."""
        ...


class LinearFc1Builder(Protocol):
    """Builder of the first linear layer, with `output_size` doubled and a `stride` of 2 for a gated unit."""

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
    """Builder of the second linear layer, with the rank's part of the feed-forward size as input."""

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
    """Builder of the activation between the linear layers."""

    def __call__(self, *, config: Any) -> TEActivationFunctionInterface: ...
