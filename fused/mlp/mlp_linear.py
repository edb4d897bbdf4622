"""Linear layers of an MLP on plain torch, with optional tensor parallelism and deferred weight gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fused.backends.tracing import differentiated, transformed
from fused.mlp.config import TransformerConfig
from fused.mlp.megatron_checkpoint import layer_state
from fused.mlp.protocols import Initializer, ProcessGroup
from fused.mlp.shares import Shares, copied, gathered, own_part, summed

Tensor = torch.Tensor
Pending = list[tuple[Tensor, Tensor]]


class _DeferredLinear(torch.autograd.Function):
    """Autograd function of x @ weightᵀ with a deferred weight gradient.

    The backward pass appends x and the output gradient to `pending`. The weight is passed detached, since a gradient
    of None would run its hooks too. An x without gradient needs an `anchor` with one, so there is a backward pass.
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
        init_method: fills the weight ``[output_size, input_size]`` in place; the bias is initialized to 0.
        bias: whether there is one, ``[output_size]``.
        skip_bias_add: True to return the bias instead of adding it.
        dtype: of the parameters.
        delay_wgrad_compute: True to leave the weight's gradient to `backward_dw`. Under `torch.compile` and
            `torch.func` transforms it is not deferred.

    Attributes:
        cut: the dimension of each parameter that is sharded over `tp_group`.
        tp_group: the tensor-parallel ranks, None for one.

    Source: Megatron-LM ``ColumnParallelLinear`` and ``RowParallelLinear``, at a tensor-parallel size of 1.
    """

    cut: Mapping[str, int] = {}
    tp_group: ProcessGroup | None = None

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
        """Map ``[..., input_size]`` to ``[..., output_size]``, and return the bias unless added, else None."""
        if self.skip_bias_add or self.delay_wgrad_compute:
            return self._with_bias(self.product(x))
        return F.linear(x, self.weight, self.bias), None

    def _with_bias(self, out: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None

    def product(self, x: Tensor) -> Tensor:
        """Compute ``x @ weightᵀ``, deferring the weight gradient if so configured."""
        if not self.delay_wgrad_compute or transformed() or not differentiated(self.weight):
            return F.linear(x, self.weight)
        anchor = None if x.requires_grad else x.new_empty(0).requires_grad_()
        out: Tensor = _DeferredLinear.apply(x, self.weight.detach(), anchor, self._pending)
        return out

    def backward_dw(self) -> None:
        """Add to ``weight.grad`` the gradients deferred by all backward passes since the last call.

        They are accumulated by autograd, so hooks of the weight run.
        """
        pending, self._pending[:] = list(self._pending), []
        for x, g in pending:
            rows = g.reshape(-1, g.shape[-1])
            gradient = rows.t() @ x.reshape(-1, x.shape[-1]).to(g.dtype)
            torch.autograd.backward(self.weight, gradient.to(self.weight.dtype))

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state as objects of Megatron's ``dist_checkpointing``, for which megatron.core must be installed.

        Args:
            prefix: of every name.
            sharded_offsets: ``(axis, offset, size)`` of further dimensions in front, such as the pipeline stages.
            metadata: Megatron's, whose `dp_cp_group` is the data-parallel ranks, by default those of its global state.

        Raises:
            NotImplementedError: if Megatron cannot be imported.
        """
        return layer_state(self, prefix, sharded_offsets, metadata)

    def extra_repr(self) -> str:
        """Return sizes and settings for ``repr``."""
        output_size, input_size = self.weight.shape
        return (
            f"{input_size}, {output_size}, bias={self.bias is not None}, skip_bias_add={self.skip_bias_add}, "
            f"delay_wgrad_compute={self.delay_wgrad_compute}"
        )


class ColumnParallelLinear(Linear):
    """`Linear` sharded on the outputs.

    Args:
        whole: the unsharded layer; its parameters are sliced, and it is not stored.
        shares: this rank's share.
        gather_output: True to return the outputs of all ranks, concatenated.

    Source: Megatron-LM ``ColumnParallelLinear``.
    """

    def __init__(self, whole: Linear, shares: Shares, gather_output: bool) -> None:
        nn.Module.__init__(self)
        self.skip_bias_add, self.delay_wgrad_compute = whole.skip_bias_add, whole.delay_wgrad_compute
        self.shares, self.tp_group = shares, shares.group
        self.gather_output, self._pending = gather_output, []
        self.weight = nn.Parameter(shares.cut(whole.weight.detach(), 0))
        self.bias = None if whole.bias is None else nn.Parameter(shares.cut(whole.bias.detach(), 0))
        self.cut = {"weight": 0, "bias": 0}

    def forward(self, x: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Map ``[..., input_size]`` to ``[..., output_size / ranks]``, and return the local bias or None.

        With `gather_output` both have the full ``output_size``.
        """
        out, bias = self._with_bias(self.product(copied(x, self.shares)))
        if not self.gather_output:
            return out, bias
        return gathered(out, self.shares), None if bias is None else gathered(bias, self.shares)


class RowParallelLinear(Linear):
    """`Linear` sharded on the inputs, with an all-reduced result.

    Args:
        whole: the unsharded layer; its weight is sliced, and it is not stored.
        shares: this rank's share.
        input_is_parallel: whether the input is sharded already.

    Source: Megatron-LM ``RowParallelLinear``.
    """

    def __init__(self, whole: Linear, shares: Shares, input_is_parallel: bool) -> None:
        nn.Module.__init__(self)
        self.skip_bias_add, self.delay_wgrad_compute = whole.skip_bias_add, whole.delay_wgrad_compute
        self.shares, self.tp_group = shares, shares.group
        self.input_is_parallel, self._pending = input_is_parallel, []
        self.weight = nn.Parameter(shares.cut(whole.weight.detach(), 1))
        self.bias = whole.bias
        self.cut = {"weight": 1}

    def forward(self, x: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Map ``[..., input_size / ranks]`` to ``[..., output_size]``, and return the full bias unless added."""
        own = x if self.input_is_parallel else own_part(x, self.shares)
        return self._with_bias(summed(self.product(own), self.shares))


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
    name: str | None = None,
    pg_collection: Any = None,
) -> Linear:
    """Build the first linear layer, a `Linear` with the dtype and the deferral of `config` (a `LinearFc1Builder`).

    With a `tp_group` of several ranks the outputs are sharded, separately in each of `stride` packed parts; the input
    is replicated, and its gradients are all-reduced. The full weight is initialized on every rank, which requires the
    same seed on all ranks. `is_expert`, `tp_comm_buffer_name`, `name` and `pg_collection` are ignored.

    Raises:
        ValueError: if the outputs cannot be sharded evenly, or packed outputs are to be gathered.
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
    name: str | None = None,
    pg_collection: Any = None,
) -> Linear:
    """Build the second linear layer, a `Linear` with the dtype and the deferral of `config` (a `LinearFc2Builder`).

    With a `tp_group` of several ranks the inputs are sharded; the products are all-reduced before the replicated bias
    is added. `is_expert`, `tp_comm_buffer_name`, `name` and `pg_collection` are ignored.

    Raises:
        ValueError: if the inputs cannot be sharded evenly.
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
