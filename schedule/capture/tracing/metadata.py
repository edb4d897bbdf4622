"""Classification of torch functions for the tracer: metadata queries, mutations, or ordinary nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from fused.torch_internals.tensors import TENSOR_MODULE, DataDependentOutputException, DynamicOutputShapeException
from schedule.capture.tracing.result_kinds import LAYOUT, PROPERTIES

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

_CONSTANT_ATTRIBUTES = {
    "dtype", "ndim", "layout", "names", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse",
    "is_quantized", "is_nested", "itemsize", "is_mkldnn", "is_sparse_csr", "is_xla",
}  # fmt: skip
AUTOGRAD_STATE = {"is_leaf", "grad_fn", "grad", "_version", "retains_grad", "output_nr"}
"""Tensor attributes on how it was computed and used since. They are not available in a trace."""
_CONSTANT_METHODS = {
    "dim", "ndimension", "is_floating_point", "is_complex", "element_size",
    "__hash__", "is_signed",
}  # fmt: skip
_CONSTANT_FUNCTIONS = {torch.is_floating_point, torch.is_complex, torch.result_type}

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "__floordiv__": operator.floordiv,
    "matmul": operator.matmul,
    "__matmul__": operator.matmul,
    "pow": operator.pow,
    "neg": operator.neg,
    "__invert__": operator.invert,
    "gt": operator.gt,
    "lt": operator.lt,
    "ge": operator.ge,
    "le": operator.le,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
}
_REVERSED: dict[str, Callable[..., Any]] = {
    "__rsub__": operator.sub,
    "__rdiv__": operator.truediv,
    "__rpow__": operator.pow,
    "__rmatmul__": operator.matmul,
    "__rfloordiv__": operator.floordiv,
}


_OF_LAYOUT = ("layout", "is_sparse", "is_sparse_csr", "is_mkldnn")


def attribute_name(func: Any) -> str | None:
    """Return ``"shape"`` for the getter of ``Tensor.shape``, and None if ``func`` is not an attribute getter."""
    if getattr(func, "__name__", "") != "__get__":
        return None
    return getattr(func.__self__, "__name__", None)


def is_attribute(func: Any, name: str) -> bool:
    """Check whether ``func`` is the getter of tensor attribute ``name``."""
    return attribute_name(func) == name


def is_method(func: Any) -> bool:
    """Check whether ``func`` is a method of ``torch.Tensor`` (written as ``x.name(…)``)."""
    owner = getattr(func, "__objclass__", None)
    if owner is not None:
        return issubclass(torch.Tensor, owner)
    return getattr(func, "__module__", "") == TENSOR_MODULE


def is_constant_query(func: Any) -> bool:
    """Check whether the result depends on neither data nor sizes (dtype, rank, layout, …)."""
    name = attribute_name(func)
    if name is not None:
        return name in _CONSTANT_ATTRIBUTES
    if func in _CONSTANT_FUNCTIONS:
        return True
    return is_method(func) and func.__name__ in _CONSTANT_METHODS


def asked_by(func: Any) -> tuple[str, ...]:
    """Return what a constant query asks for, of ``PROPERTIES`` and ``LAYOUT``."""
    if is_attribute(func, "ndim") or func is torch.Tensor.dim:
        return ("rank",)
    if is_attribute(func, "device"):
        return ("device",)
    return (*PROPERTIES, LAYOUT) if attribute_name(func) in _OF_LAYOUT else PROPERTIES


def written_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return ``(target, args)`` of the node for a call: an operator, a method name, or the function."""
    name = attribute_name(func)
    if name is not None:
        return getattr, (args[0], name)
    if not is_method(func):
        return func, args
    if not kwargs and func.__name__ in _REVERSED and len(args) == 2:
        return _REVERSED[func.__name__], (args[1], args[0])
    arity = 3 if func.__name__ == "__setitem__" else 1 if func.__name__ in ("neg", "__invert__") else 2
    if not kwargs and len(args) == arity and func.__name__ in _OPERATORS:
        return _OPERATORS[func.__name__], args
    return func.__name__, args
