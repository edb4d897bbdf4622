"""Autograd functions with a backward equal to the derivative of their forward, written by hand only for speed.

They are inlined, so that a rule sees what they compute. The two are compared: the function is run on random numbers
and may use only analytic elementwise operations. Analytic functions that agree on a neighborhood agree everywhere.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.autograd import Function

from fused.torch_internals.modes import DisableTorchFunction, TorchDispatchMode
from schedule.util.internal_errors import perform

_ANALYTIC = {"add", "sub", "rsub", "mul", "div", "neg", "pow", "reciprocal", "exp", "tanh", "sigmoid", "erf"}
_ANALYTIC |= {"sin", "cos", "detach", "alias", "clone", "_to_copy"}
_SAMPLE = 3  # per dimension

_known: dict[type[Function], bool] = {}


class _Other(Exception):
    """Operation other than the analytic ones."""


class _OnlyAnalytic(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _ANALYTIC or (name == "pow" and not _is_whole(args[1])):
            raise _Other(name)
        return perform(func, *args, **(kwargs or {}))


def _is_whole(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and float(exponent).is_integer() and exponent >= 0


class _Context:
    """Placeholder for autograd's context while a forward is run only for its result."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Do nothing: no tensor is saved."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Refuse, because the derivative is then different."""
        raise _Other("mark_non_differentiable")

    mark_dirty = mark_non_differentiable

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: it does not change the result."""


def inlined(cls: type[Function], args: tuple[Any, ...]) -> Any:
    """Compute ``cls.apply(*args)`` step by step by running the forward."""
    return cls.forward(*args) if _in_two_parts(cls) else cls.forward(_Context(), *args)


def is_derivative(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check whether the backward of ``cls`` is the derivative of its forward, for tensors of one shape."""
    if kwargs or not all(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in args):
        return False
    with DisableTorchFunction(), torch.enable_grad():  # sizes that a tracer knows stay open
        if any(arg.shape != args[0].shape for arg in args):
            return False
        if cls not in _known:
            _known[cls] = _agrees(cls, len(args), (_SAMPLE,) * max(args[0].ndim, 1))
    return _known[cls]


def _agrees(cls: type[Function], count: int, shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    *given, incoming = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(count + 1)
    )
    try:
        with _OnlyAnalytic():
            own = _gradients(cls.apply(*given), given, incoming)
        derived = _gradients(inlined(cls, tuple(given)), given, incoming)
    except (_Other, RuntimeError, TypeError, ValueError, AttributeError):  # it takes other arguments than a sample
        return False
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(own, derived, strict=True))


def _gradients(out: Any, given: list[torch.Tensor], incoming: torch.Tensor) -> list[torch.Tensor]:
    if not isinstance(out, torch.Tensor) or out.shape != incoming.shape:
        raise _Other("several outputs")
    return [out, *torch.autograd.grad(out, given, incoming.detach())]


def _in_two_parts(cls: type[Function]) -> bool:
    return inspect.getattr_static(cls, "setup_context") is not inspect.getattr_static(Function, "setup_context")
