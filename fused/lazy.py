"""Tensors whose values are computed when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from fused.loss_autograd import gradients_by_autograd
from fused.torch_internals.modes import NO_TORCH_FUNCTION
from fused.torch_internals.tensor_kinds import make_wrapper_subclass

Tensor = torch.Tensor
Expression = Callable[..., Tensor]

_READING_MEMORY: tuple[str, ...] = ("numpy", "tolist", "data_ptr", "untyped_storage", "storage")
_READING_MEMORY += ("__array__", "__dlpack__", "__dlpack_device__", "__deepcopy__", "__reduce_ex__", "__repr__")


def lazy(expression: Expression, operands: Sequence[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return ``expression(*operands)``, computed at its first use, or never.

    It can be differentiated as often as the expression, and keeps the operands as long as it is referred to.

    Args:
        expression: of plain differentiable operations, without random numbers.
        operands: its arguments. None of them may be changed in place before the first use.
        shape: the shape of the result.
        dtype: its dtype.

    Raises (when used):
        RuntimeError: an operand was changed in place, or the expression raises.
    """
    unchanged = _Unchanged(expression, operands)
    device = next(each.device for each in operands if each is not None)
    result: Tensor = _Lazily.apply(unchanged, tuple(shape), dtype, device, *operands)
    return result


class _Unchanged:
    """An expression that refuses operands that were changed in place."""

    def __init__(self, expression: Expression, operands: Sequence[Tensor | None]) -> None:
        self.expression = expression
        self.versions = [_version(each) for each in operands]

    def check(self, operands: Sequence[Tensor | None]) -> None:
        if [_version(each) for each in operands] != self.versions:
            raise RuntimeError(
                "a tensor that is computed when it is used cannot be: what it is computed from was changed in place "
                "before. Use it earlier"
            )


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


class _Lazy(torch.Tensor):
    """A tensor of known shape and dtype, whose values are computed at the first operation on it."""

    _compute: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> _Lazy:
        made: _Lazy = make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._compute, made._value = compute, None
        return made

    __torch_function__ = NO_TORCH_FUNCTION  # results are plain tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*map_aggregate(args, _computed), **map_aggregate(kwargs or {}, _computed))

    def computed(self) -> Tensor:
        """Return the values, as a plain tensor without a gradient."""
        if self._value is None:
            with torch.no_grad():
                self._value = self._compute()
            del self._compute
        return self._value


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, _Lazy) else value


def _of_values(name: str) -> Callable[..., Any]:
    def method(self: _Lazy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.computed(), name)(*args, **kwargs)

    return method


for _name in _READING_MEMORY:
    setattr(_Lazy, _name, _of_values(_name))


class _Lazily(torch.autograd.Function):
    """Autograd function that returns a lazy tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        expression: _Unchanged,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *operands: Tensor | None,
    ) -> Tensor:
        # Saved in this way they pass no hooks of saved tensors: most often there is no backward pass through this.
        ctx.expression, ctx.operands = expression, operands

        def compute() -> Tensor:
            expression.check(operands)
            return expression.expression(*operands)

        return _Lazy(compute, shape, dtype, device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.expression.check(ctx.operands)
        found = gradients_by_autograd(ctx.expression.expression, ctx.operands, ctx.needs_input_grad[4:], grads[0])
        return None, None, None, None, *found
