"""Kinds of tensors without data, their sizes in symbols, and parts of tensors without a public name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor

from fused.assumptions import holds, unavailable
from fused.torch_internals.schemas import is_drawing, may_raise, written_arguments

__all__ = [
    "TENSOR_MODULE",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "ObservingFakeMode",
    "SymbolicSizes",
    "failures_unlogged",
    "has_own_memory",
    "make_wrapper_subclass",
    "neural_functions",
    "parse_to",
    "set_version",
    "storage_of",
]

TENSOR_MODULE = "torch._tensor"
"""Module of the methods of tensors that are written in Python."""

neural_functions: ModuleType = torch._C._nn
"""Functions that :mod:`torch.nn.functional` hands on as they are."""


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Suppress torch's log of failing operations on fake tensors, in this thread only.

    Their exceptions are raised as usual.
    """
    logger, own = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger.addFilter(is_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(is_elsewhere)


make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype of ``module.to(*args, **kwargs)``."""
    device, dtype, *_ = neural_functions._parse_to(*args, **kwargs)
    return device, dtype


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set autograd's count of in-place changes of ``tensor``."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def has_own_memory(cls: type[torch.Tensor]) -> bool:
    """Check whether tensors of ``cls`` have memory of their own. Wrapper subclasses compute with other tensors."""
    return cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor``, the same for all its views."""
    return int(tensor.untyped_storage()._cdata)


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the shape of ``torch.nn.functional.grouped_mm``. Up to torch 2.13 its meta kernel takes bfloat16 only."""
    rows, columns = mat_a.shape[-2], mat_b.shape[-1]
    groups: tuple[int, ...] = mat_a.shape[:-2] if mat_a.dim() == mat_b.dim() else ()
    if mat_a.dim() == mat_b.dim() == 2:
        groups = (0,) if offs is None else offs.shape
    return mat_a.new_empty((*groups, rows, columns), dtype=out_dtype or mat_a.dtype)


_META_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {}
if hasattr(torch.ops.aten, "_grouped_mm"):
    _META_KERNELS[torch.ops.aten._grouped_mm.default] = _grouped_mm
"""Operators whose meta kernel refuses what the operator takes, with one that does not."""


class ObservingFakeMode(FakeTensorMode):
    """Mode of data-free tensors that observes the side effects of the operations dispatched in it.

    Torch functions call operators, and operators declare in their schemas what they write and whether they draw random
    numbers, so nothing has to be known of the function itself.

    Attributes:
        written: the storages that operations have changed since :meth:`observe`, by address.
        draws: whether an operation has drawn random numbers since.
        raises: whether an operation since may raise because of the data of its tensors.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written: set[int] = set()
        self.draws = self.raises = self._is_nested = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservingFakeMode:
        return self  # a deep copy of a tensor copies its attributes, of which the mode is one

    def observe(self) -> None:
        """Begin a new observation."""
        self.written, self.draws, self.raises = set(), False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.draws = self.draws or is_drawing(func, args, kwargs or {})
        self.raises = self.raises or may_raise(func, args, kwargs or {})
        if (kernel := _META_KERNELS.get(func)) is not None:
            return kernel(*args, **(kwargs or {}))
        if self._is_nested:  # views are decomposed into operators that are declared to write
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.written.update(map(storage_of, written_arguments(func, args, kwargs or {})))
        self._is_nested = True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._is_nested = False


class SymbolicSizes:
    """Tensors without data, with numbers of another kind in place of some sizes."""

    def __init__(self) -> None:
        if not holds("sizes in symbols"):
            unavailable("sizes in symbols")()
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports the compiler

        self._shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._shapes)
        self._given: dict[Any, Any] = {}

    def number(self, given: Any, value: int) -> Any:
        """Return a symbol of torch for the number ``given``, ``value`` in an example."""
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(f"given_{len(self._given)}")
        symbol = self._shapes.create_symbol(
            value, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        self._given[symbol] = given
        return self._shapes.create_symintnode(symbol, hint=value, source=source)

    def tensor(self, sizes: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of these sizes: numbers, or what :meth:`number` returned."""
        with self._mode:
            return torch.empty(sizes, dtype=dtype, device=device)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` with such tensors. It raises what it raises for tensors, or for sizes that data decide."""
        from torch._dispatch.python import enable_python_dispatcher

        with failures_unlogged(), enable_python_dispatcher(), self._mode:  # the second for operations made of others
            return function(*args, **kwargs)

    def expressed(self, size: Any) -> Any:
        """Return a size of a result as arithmetic on the given numbers.

        Raises:
            KeyError: data decide it.
        """
        return self._interpreted(size.node.expr) if isinstance(size, torch.SymInt) else size

    def conditions(self) -> Iterator[Any]:
        """Yield the conditions of the results, as comparisons of the given numbers."""
        for guard in self._shapes.guards:
            yield self._interpreted(guard.expr)

    def _interpreted(self, expression: Any) -> Any:
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        return sympy_interp(PythonReferenceAnalysis, self._given, expression)
