"""Sizes of what operations return, as arithmetic on the sizes that they are given, by torch's own shape functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fused.torch_internals.tensors import FakeTensorMode, failures_unlogged


class SymbolicSizes:
    """Tensors without data, with numbers of another kind in place of some sizes."""

    def __init__(self) -> None:
        self._shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self._mode = FakeTensorMode(shape_env=self._shapes)
        self._given: dict[Any, Any] = {}

    def number(self, given: Any, value: int) -> Any:
        """Return a symbol of torch for the number ``given``, which is ``value`` in an example."""
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
        with ExitStack() as stack:
            stack.enter_context(failures_unlogged())
            stack.enter_context(enable_python_dispatcher())  # for operations composed of others
            stack.enter_context(self._mode)
            return function(*args, **kwargs)

    def expressed(self, size: Any) -> Any:
        """Return a size of a result as arithmetic on the given numbers."""
        return self._interpreted(size.node.expr) if isinstance(size, torch.SymInt) else size

    def conditions(self) -> Iterator[Any]:
        """Yield the conditions on the given numbers that the results hold for, as comparisons of these."""
        for guard in self._shapes.guards:
            yield self._interpreted(guard.expr)

    def _interpreted(self, expression: Any) -> Any:
        return sympy_interp(PythonReferenceAnalysis, self._given, expression)
