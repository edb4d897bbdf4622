"""Torch functions in a trace: metadata queries, mutations or nodes, and kernels for data-free tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from fused.torch_internals.tensor_kinds import TENSOR_MODULE, DataDependentOutputException, DynamicOutputShapeException
from schedule.capture.effects.result_kinds import LAYOUT, PROPERTIES
from schedule.capture.recording.structure import tensors
from schedule.util.internal_errors import perform

# -- Guards on the number of tensors returned by ``unbind`` -------------------------------------------------


_UNBINDING, _CHUNKING = ("unbind", "__iter__"), ("chunk", "unsafe_chunk")
_SPLITTING = ("split", "unsafe_split")


def guard_number(
    shape: Callable[[torch.Tensor], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Guard on the number of tensors returned by ``x.unbind()``, ``x.split(n)`` or ``x.chunk(n)``."""
    name = getattr(func, "__name__", "")
    if name not in (*_UNBINDING, *_CHUNKING, *_SPLITTING):
        return
    tensor, *rest = args if args else (kwargs.get("input", kwargs.get("tensor")),)
    given: Any = None
    if name not in _UNBINDING:
        names = ("split_size", "split_size_or_sections") if name in _SPLITTING else ("chunks",)
        given = rest.pop(0) if rest else next(kwargs[key] for key in names if key in kwargs)
    dim = rest[0] if rest else kwargs.get("dim", 0)
    if isinstance(given, (int, torch.SymInt)) or name in _UNBINDING:
        int(_number(name, shape(tensor)[dim], given))


def _number(name: str, size: Any, given: Any) -> Any:
    if name in _UNBINDING or size == 0:
        return size
    length = given if name in _SPLITTING else _pieces(size, given)
    return _pieces(size, length)


def _pieces(size: Any, length: Any) -> Any:
    """Return the number of pieces of ``length`` to cover ``size``."""
    return (size + length - 1) // length


# -- Meta kernels for torch functions unsupported on data-free tensors by torch itself ----------------------


def _tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> torch.Tensor:
    """Build ``torch.tensor(data)`` for lists with tensors too, without reading the tensors' data."""
    if not isinstance(data, (list, tuple)) or not any(True for _ in tensors(data)):
        how: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
        return perform(torch.tensor, data, **how, pin_memory=pin_memory)
    stacked = torch.stack([item if isinstance(item, torch.Tensor) else _tensor(item) for item in data])
    return torch.empty_like(stacked, dtype=dtype, device=device, requires_grad=requires_grad)


def _picked(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Index ``tensor[index]``, with 0-d integer tensors replaced by 0: the shape does not depend on their value."""
    parts = index if isinstance(index, tuple) else (index,)
    numbers = tuple(0 if _is_number(part) else part for part in parts)
    return perform(operator.getitem, tensor, numbers)


def _is_number(value: Any) -> bool:
    """Check whether ``value`` is a 0-d integer tensor, used by an index as a number."""
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 0
        and not value.is_floating_point()
        and value.dtype not in (torch.bool, torch.uint8)
    )


_META_KERNELS: dict[Any, Callable[..., Any]] = {torch.tensor: _tensor, torch.Tensor.__getitem__: _picked}


def meta_kernel(function: Any) -> Callable[..., Any]:
    """Return the meta kernel for ``function``, by default the function itself."""
    return _META_KERNELS.get(function, function)


# -- Classification of torch functions for the tracer -------------------------------------------------------


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
