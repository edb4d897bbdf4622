"""The linear layers of an MLP on plain torch, whole or tensor-parallel, with weight gradients that can be put off."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fused.backends.tracing import differentiated, transformed
from fused.mlp.config import TransformerConfig
from fused.mlp.protocols import Initializer, ProcessGroup
from fused.mlp.shares import Shares, copied, gathered, own_part, summed

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
        if self.skip_bias_add or self.delay_wgrad_compute:
            return self._with_bias(self.product(x))
        return F.linear(x, self.weight, self.bias), None

    def _with_bias(self, out: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None

    def product(self, x: Tensor) -> Tensor:
        """``x @ weightᵀ``, whose weight gradient may be put off."""
        if not self.delay_wgrad_compute or transformed() or not differentiated(self.weight):
            return F.linear(x, self.weight)
        anchor = None if x.requires_grad else x.new_empty(0).requires_grad_()
        out: Tensor = _DeferredLinear.apply(x, self.weight.detach(), anchor, self._pending)
        return out

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


class ColumnParallelLinear(Linear):
    """This rank's share of the outputs of a `Linear`.

    Args:
        whole: whose parameters are cut; not kept.
        shares: how.
        gather_output: True to return every rank's outputs side by side.

    Source: Megatron-LM ``ColumnParallelLinear``.
    """

    def __init__(self, whole: Linear, shares: Shares, gather_output: bool) -> None:
        nn.Module.__init__(self)
        self.skip_bias_add, self.delay_wgrad_compute = whole.skip_bias_add, whole.delay_wgrad_compute
        self.shares, self.gather_output, self._pending = shares, gather_output, []
        self.weight = nn.Parameter(shares.cut(whole.weight.detach(), 0))
        self.bias = None if whole.bias is None else nn.Parameter(shares.cut(whole.bias.detach(), 0))
        self.cut = {"weight": 0, "bias": 0}

    def forward(self, x: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size]`` to ``[..., output_size / ranks]``, and this rank's share of the bias, or None."""
        out, bias = self._with_bias(self.product(copied(x, self.shares.group)))
        if not self.gather_output:
            return out, bias
        return gathered(out, self.shares), None if bias is None else gathered(bias, self.shares)


class RowParallelLinear(Linear):
    """A `Linear` on this rank's share of the inputs; the sum over the ranks comes back.

    Args:
        whole: whose weight is cut; not kept.
        shares: how.
        input_is_parallel: whether the input is this rank's share already.

    Source: Megatron-LM ``RowParallelLinear``.
    """

    def __init__(self, whole: Linear, shares: Shares, input_is_parallel: bool) -> None:
        nn.Module.__init__(self)
        self.skip_bias_add, self.delay_wgrad_compute = whole.skip_bias_add, whole.delay_wgrad_compute
        self.shares, self.input_is_parallel, self._pending = shares, input_is_parallel, []
        self.weight = nn.Parameter(shares.cut(whole.weight.detach(), 1))
        self.bias = whole.bias
        self.cut = {"weight": 1}

    def forward(self, x: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """``[..., input_size / ranks]`` to ``[..., output_size]``, and the whole bias if it was not added."""
        own = x if self.input_is_parallel else own_part(x, self.shares)
        return self._with_bias(summed(self.product(own), self.shares.group))


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

    Over a `tp_group` of several ranks each has its share of the outputs, of each of `stride` packed parts; the input is
    whole on every rank, and its gradients are added up. The weight is initialized whole, from one seed on all ranks.
    `is_expert` and `tp_comm_buffer_name` mean nothing here.

    Raises:
        ValueError: the ranks cannot share the outputs evenly, or packed ones are to be gathered.
    """
    shares = Shares.of("column_parallel_linear", "outputs", output_size, stride, tp_group)
    if shares is not None and gather_output and stride > 1:
        raise ValueError("column_parallel_linear: gathered parts of packed outputs would be in another order")
    made = _linear(input_size, output_size, config, init_method, bias, skip_bias_add)
    return made if shares is None else ColumnParallelLinear(made, shares, gather_output)


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

    Over a `tp_group` of several ranks each has its share of the inputs; the products are added up before the bias,
    which is whole. `is_expert` and `tp_comm_buffer_name` mean nothing here.

    Raises:
        ValueError: the ranks cannot share the inputs evenly.
    """
    shares = Shares.of("row_parallel_linear", "inputs", input_size, 1, tp_group)
    made = _linear(input_size, output_size, config, init_method, bias, skip_bias_add)
    return made if shares is None else RowParallelLinear(made, shares, input_is_parallel)


def _linear(
    input_size: int, output_size: int, config: Any, init_method: Initializer, bias: bool, skip_bias_add: bool
) -> Linear:
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
