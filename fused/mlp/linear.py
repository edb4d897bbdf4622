"""The linear layers of an MLP on plain torch, on one device, with weight gradients that can be put off."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fused.backends.tracing import differentiated, transformed
from fused.mlp.config import TransformerConfig
from fused.mlp.protocols import Initializer, ProcessGroup

Tensor = torch.Tensor
Pending = list[tuple[Tensor, Tensor]]


class _DeferredLinear(torch.autograd.Function):
    """x @ weightᵀ, whose backward pass notes for the weight's gradient what it is made of.

    The weight comes detached, since a gradient of None would run its hooks too. An x without gradient needs an
    `anchor` that has one, so that there is a backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, anchor: Tensor | None, pending: Pending) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pending = pending
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.pending.append((x.detach(), grad_output))
        dx = (grad_output @ weight.to(grad_output.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class Linear(nn.Module):
    """``x @ weightᵀ``, returned together with the bias or with it added.

    Args:
        input_size, output_size: of the last dimension.
        init_method: fills the weight ``[output_size, input_size]`` in place; the bias begins at 0.
        bias: whether there is one, ``[output_size]``.
        skip_bias_add: True to return the bias instead of adding it.
        dtype: of the parameters.
        delay_wgrad_compute: True to leave the weight's gradient to `backward_dw`. Under `torch.compile` and
            `torch.func` transforms it is not put off.

    Source: Megatron-LM ``ColumnParallelLinear`` and ``RowParallelLinear``, at a tensor-parallel size of 1.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        init_method: Initializer,
        bias: bool = True,
        skip_bias_add: bool = False,
        dtype: torch.dtype | None = None,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.delay_wgrad_compute = delay_wgrad_compute
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype))
        with torch.no_grad():
            init_method(self.weight)
        self.bias = nn.Parameter(torch.zeros(output_size, dtype=dtype)) if bias else None
        self._pending: Pending = []

    def forward(self, x: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size]`` to ``[..., output_size]``, and the bias if it was not added, else None."""
        added = None if self.skip_bias_add else self.bias
        returned = self.bias if self.skip_bias_add else None
        if not self.delay_wgrad_compute or transformed() or not differentiated(self.weight):
            return F.linear(x, self.weight, added), returned
        anchor = None if x.requires_grad else x.new_empty(0).requires_grad_()
        out: Tensor = _DeferredLinear.apply(x, self.weight.detach(), anchor, self._pending)
        return out if added is None else out + added, returned

    def backward_dw(self) -> None:
        """Add the gradients put off by all backward passes since the last call to ``weight.grad``.

        They go the way of every gradient: hooks of the weight run.
        """
        pending, self._pending[:] = list(self._pending), []
        for x, g in pending:
            rows = g.reshape(-1, g.shape[-1])
            gradient = rows.t() @ x.reshape(-1, x.shape[-1]).to(g.dtype)
            torch.autograd.backward(self.weight, gradient.to(self.weight.dtype))

    def extra_repr(self) -> str:
        """Sizes and settings."""
        output_size, input_size = self.weight.shape
        return (
            f"{input_size}, {output_size}, bias={self.bias is not None}, skip_bias_add={self.skip_bias_add}, "
            f"delay_wgrad_compute={self.delay_wgrad_compute}"
        )


def column_parallel_linear(
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
    tp_comm_buffer_name: str | None = None,
    tp_group: ProcessGroup | None = None,
    stride: int = 1,
) -> Linear:
    """A `LinearFc1Builder`: `Linear` with the dtype and the deferral of `config`.

    `gather_output`, `is_expert`, `tp_comm_buffer_name` and `stride` mean nothing on one device.

    Raises:
        NotImplementedError: for a `tp_group` of more than one rank.
    """
    return _on_one_device(
        "column_parallel_linear", input_size, output_size, config, init_method, bias, skip_bias_add, tp_group
    )


def row_parallel_linear(
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
    tp_comm_buffer_name: str | None = None,
    tp_group: ProcessGroup | None = None,
) -> Linear:
    """A `LinearFc2Builder`: `Linear` with the dtype and the deferral of `config`.

    `input_is_parallel`, `is_expert` and `tp_comm_buffer_name` mean nothing on one device.

    Raises:
        NotImplementedError: for a `tp_group` of more than one rank.
    """
    return _on_one_device(
        "row_parallel_linear", input_size, output_size, config, init_method, bias, skip_bias_add, tp_group
    )


def _on_one_device(
    op: str,
    input_size: int,
    output_size: int,
    config: Any,
    init_method: Initializer,
    bias: bool,
    skip_bias_add: bool,
    tp_group: ProcessGroup | None,
) -> Linear:
    if tp_group is not None and tp_group.size() > 1:
        raise NotImplementedError(
            f"{op}: the layer [{output_size}, {input_size}] cannot be cut over a tensor-parallel group of "
            f"{tp_group.size()} ranks yet; pass no tp_group and shard it with the schedule's .shard, or give MLP "
            "submodules that are parallel themselves"
        )
    settings = TransformerConfig.of(config)
    return Linear(
        input_size,
        output_size,
        init_method=init_method,
        bias=bias,
        skip_bias_add=skip_bias_add,
        dtype=settings.params_dtype,
        delay_wgrad_compute=settings.delay_wgrad_compute,
    )
