"""Reading of sizes, as expressions of sizes of inputs and parameters if this can be proved.

``linear(x, w).view(b, s, -1).shape[0]`` is ``b`` for any ``b``. If sizes are traced back to the inputs, a branch on
them can be decided before the graph runs, and intermediate values have no extra users.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import activation

from fused.torch_internals.modes import DisableTorchFunction
from schedule.capture.effects import torch_calls as metadata
from schedule.capture.effects.effects import changed
from schedule.capture.graph.scalars import scalar_of, symbolic
from schedule.capture.graph.trace_interface import Trace
from schedule.capture.guards.own_forward import has_own_forward, is_projection
from schedule.capture.recording.hooks import is_hooked
from schedule.capture.recording.structure import TensorSpec
from schedule.capture.shapes.derived_sizes import derived_size
from schedule.capture.shapes.size_rules import (
    ADDED,
    LENGTHENING,
    SAME_SHAPE_FUNCTIONS,
    SAME_SHAPE_METHODS,
    SCALAR_OPERATORS,
    dims_of_result,
    permuted,
    same_shape,
    settings_of,
    size_read,
    sliced_length,
    windowed_size,
)

_ACTIVATIONS = [getattr(nn, name) for name in activation.__all__ if name not in ("GLU", "MultiheadAttention")]
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_SAME_SHAPE_MODULES = (nn.Identity, *_DROPOUTS, *_NORMS, *_ACTIVATIONS)
_REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "var")
_MAX_NESTED = 16  # residual streams go on for as many additions as a model has layers
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


class SizeReader:
    """Reader of ``x.shape``, ``x.size(…)`` and ``len(x)`` for ``tracer``."""

    def __init__(self, tracer: Trace) -> None:
        self.tracer = tracer
        self._sizes: dict[tuple[fx.Node, int], Any] = {}
        self._assumed: dict[tuple[fx.Node, int], Any] = {}
        self._derives = False
        self._shapes: dict[fx.Node, fx.Node] = {}
        self._read_behind: dict[fx.Node, fx.Node | None] = {}
        self._nested = 0

    def handles(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """Return a thunk for the result of a size query, or None if ``func`` is not one."""
        if metadata.is_attribute(func, "shape"):
            return lambda: self.shape(args[0])
        if not metadata.is_method(func) or not isinstance(args[0], torch.Tensor):
            return None
        if func.__name__ == "size":
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return lambda: self.shape(args[0]) if dim is None else self.shape(args[0])[dim]
        if func.__name__ == "__len__":
            return lambda: int(self.shape(args[0])[0])
        return None

    def shape(self, tensor: torch.Tensor) -> torch.Size:
        """Return ``tensor.shape`` with symbolic sizes."""
        with DisableTorchFunction():
            node = self.tracer.node_of(tensor)
            self.tracer.ask(node, "rank")
            if node.op == "get_attr":
                self._forget_if_changeable(node, tensor.dim())
            sizes = tuple(tensor.shape)
            return torch.Size([self.size(node, dim, int(value)) for dim, value in enumerate(sizes)])

    def _forget_if_changeable(self, node: fx.Node, rank: int) -> None:
        """Read the sizes of a tensor of a module again if other code has run since: it may have resized it."""
        call = self.tracer.last_call
        if self._read_behind.setdefault(node, call) is not call:
            self._read_behind[node] = call
            self._shapes.pop(node, None)
            for dim in range(rank):
                self._sizes.pop((node, dim), None)

    def size(self, node: fx.Node, dim: int, value: int) -> Any:
        """Return size ``dim`` of the value of ``node``, traced back as far as possible."""
        key = (node, dim)
        if key not in self._sizes:
            traced = self._trace_back(node, dim, value)
            self._sizes[key] = self._read(node, dim, value) if traced is None else traced
        return self._sizes[key]

    def _read(self, node: fx.Node, dim: int, value: int) -> Any:
        if node not in self._shapes:
            self._shapes[node] = self.tracer.emit(getattr, (node, "shape"))
        read = self.tracer.emit(operator.getitem, (self._shapes[node], dim))
        read.meta["spec"] = value
        return symbolic(self.tracer, read, value)

    def _as_size(self, written: Any, value: int) -> Any:
        """Return a size argument of a node as a number or symbolic number, or None if it is neither."""
        if isinstance(written, fx.Node):
            return None if isinstance(written.meta.get("spec"), TensorSpec) else symbolic(self.tracer, written, value)
        return written if isinstance(written, int) and written == value else None

    def _from(self, source: Any, dim: int, value: int) -> Any:
        if not isinstance(source, fx.Node):
            return None
        spec = source.meta.get("spec")
        if spec is None or dim >= spec.ndim or spec.shape[dim] != value:
            return None
        return self.size(source, dim, value)

    def _trace_back(self, node: fx.Node, dim: int, value: int) -> Any:
        rank = len(node.meta["spec"].shape)
        if node.op == "call_module":
            return self._through_module(node, dim, rank, value)
        if node.op not in ("call_function", "call_method") or not node.args:
            return None
        if node.meta.get("opaque"):
            return self._through_cache(node, dim, rank, value)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        source = node.args[0]
        if name in ("view", "reshape", "expand"):
            return self._through_view(node, dim, rank, value)
        if name == "unflatten" and len(node.args) == 3:
            return self._through_unflatten(node, dim, rank, value)
        if name in ("transpose", "permute"):
            return self._from(source, permuted(name, settings_of(node), dim, rank), value)
        if _is_leading(node, name, dim, rank) or source in changed(node):
            return self._from(source, dim, value)
        if name == "unsqueeze" and isinstance(at := settings_of(node)[0], int):
            at %= rank
            return 1 if dim == at else self._from(source, dim - (dim > at), value)
        if node.target is operator.getitem:
            return self._through_getitem(node, dim, value)
        if name == "stack":
            return self._through_stack(node, dim, rank, value)
        if name in _REDUCTIONS:
            return self._through_reduction(node, dim, rank, value)
        if same_shape(node):
            return self._from(source, dim, value)
        return self._through_broadcast(node, dim, rank) if node.target in SCALAR_OPERATORS else None

    def _through_unflatten(self, node: fx.Node, dim: int, rank: int, value: int) -> Any:
        source, along, sizes = node.args
        if not isinstance(along, int) or not isinstance(sizes, (list, tuple)):
            return None
        inside = dim - along % (rank - len(sizes) + 1)
        if 0 <= inside < len(sizes):
            return self._as_size(sizes[inside], value)
        return self._from(source, dim if inside < 0 else dim - len(sizes) + 1, value)

    def _through_stack(self, node: fx.Node, dim: int, rank: int, value: int) -> Any:
        along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        parts = node.args[0]
        if not isinstance(along, int) or not isinstance(parts, (list, tuple)):
            return None
        at = along % rank
        return len(parts) if dim == at else self._from(parts[0], dim - (dim > at), value)

    def _through_reduction(self, node: fx.Node, dim: int, rank: int, value: int) -> Any:
        """Trace a size through ``x.sum(dim=-1)``: the other dimensions are unchanged."""
        along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        listed = along if isinstance(along, (tuple, list)) else (along,)
        before = _rank(node.args[0])
        if before is None or not all(type(each) is int for each in listed):
            return None
        reduced = [each % before for each in listed]
        if rank == before:
            return 1 if dim in reduced else self._from(node.args[0], dim, value)
        return self._from(node.args[0], [each for each in range(before) if each not in reduced][dim], value)

    def _through_broadcast(self, node: fx.Node, dim: int, rank: int) -> Any:
        """Trace a size through a broadcast: the common size of the operands, or a constant size other than 1."""
        if self._nested >= _MAX_NESTED:
            return None
        self._nested += 1
        try:
            sizes = [
                self.size(operand, own, operand.meta["spec"].shape[own])
                for operand in node.args
                if isinstance(operand, fx.Node) and (own := dim - rank + (_rank(operand) or 0)) >= 0 and _rank(operand)
            ]
        finally:
            self._nested -= 1
        numbers = [size for size in sizes if isinstance(size, int) and size != 1]
        symbols = [(size, scalar.node) for size in sizes if (scalar := scalar_of(size)) is not None]
        if numbers or not symbols:
            return numbers[0] if numbers else 1
        return symbols[0][0] if all(each is symbols[0][1] for _, each in symbols) else None

    def _through_cache(self, node: fx.Node, dim: int, rank: int, value: int) -> Any:
        """Trace a size through a transformers cache: only the last two dims may differ from its argument."""
        given = node.args[1] if len(node.args) > 1 else None
        return self._from(given, dim, value) if dim < rank - 2 and node.target in LENGTHENING else None

    def _through_module(self, node: fx.Node, dim: int, rank: int, value: int) -> Any:
        child = self.tracer.module.get_submodule(str(node.target))
        source = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
        if "forward" in vars(child) or is_hooked(child) or not has_own_forward(type(child)):
            return None
        if is_projection(child) and dim == rank - 1:
            features = getattr(child, "out_features", None) or getattr(child, "nf", None)
            return features if features == value else None
        looked_up = _computes_as(child, nn.Embedding) and dim < rank - 1
        if looked_up or is_projection(child) or any(_computes_as(child, cls) for cls in _SAME_SHAPE_MODULES):
            return self._from(source, dim, value)
        return None

    def _through_view(self, node: fx.Node, dim: int, rank: int, value: int) -> Any:
        sizes = node.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            sizes = tuple(sizes[0])
        if len(sizes) != rank:
            return None
        if sizes[dim] == -1 and node.target == "expand":
            return self._from(node.args[0], dim - rank + (_rank(node.args[0]) or 0), value)
        if sizes[dim] == -1 and isinstance(node.args[0], fx.Node):
            return self._inferred(node.args[0], sizes, value)
        return self._as_size(sizes[dim], value)

    # -- with assumptions, for guards only ---------------------------------------------------------------

    def assumed(self, node: fx.Node, dim: int, value: int) -> Any:
        """Trace back size ``dim`` through broadcasts, concatenations and slices as well.

        The assumptions (two operands of one size, an operand of size 1) become further guards. Returns None if the
        size cannot be traced to anything simpler than the value itself.
        """
        if (node, dim) not in self._assumed:
            self._assumed[node, dim] = self._assume(node, dim, value)
        return self._assumed[node, dim]

    @contextmanager
    def deriving(self) -> Iterator[None]:
        """Also ask torch's shape functions, and try unknown sizes again."""
        self._derives = True
        self._assumed = {key: size for key, size in self._assumed.items() if size is not None}
        try:
            yield
        finally:
            self._derives = False

    def _assume(self, node: fx.Node, dim: int, value: int) -> Any:
        if node.op in ("placeholder", "get_attr"):
            return self.size(node, dim, value)
        known = self.size(node, dim, value)
        scalar = scalar_of(known)
        if scalar is None or size_read(scalar.node) != (node, dim):
            return self._deeper(scalar.node, value) if scalar is not None else known
        if not node.args:
            return None
        name = getattr(node.target, "__name__", str(node.target))
        source: Any = node.args[0]
        if name in ("transpose", "permute", "contiguous"):
            rank = len(node.meta["spec"].shape)
            source_dim = dim if name == "contiguous" else permuted(name, settings_of(node), dim, rank)
            return self.assumed(source, source_dim, value)
        if node.target in SCALAR_OPERATORS:
            return self._broadcast(node, dim, value)
        if name in ("cat", "concat"):
            along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
            same = isinstance(along, int) and along % len(node.meta["spec"].shape) != dim
            return self.assumed(source[0], dim, value) if same else None
        if node.target is operator.getitem and _leading_slices(node, dim):
            return self.assumed(source, dim, value)
        if name in SAME_SHAPE_METHODS or name in SAME_SHAPE_FUNCTIONS:
            return self.assumed(source, dim, value)
        traced = windowed_size(self, node, dim, value)
        return derived_size(self, node, dim, value) if traced is None and self._derives else traced

    def setting(self, call: fx.Node, module: nn.Module, name: str) -> Any:
        """Return an attribute of the module called by ``call``, and guard on it."""
        value = getattr(module, name)
        read = self.tracer.emit(getattr, (self.tracer.graph.get_attr(str(call.target)), name))
        read.meta["spec"] = value
        self.tracer.guard(read, value)
        return value

    def _deeper(self, read: Any, value: int) -> Any:
        """Trace a size further if it is read from another value's shape."""
        owner = size_read(read)
        return symbolic(self.tracer, read, value) if owner is None else self.assumed(*owner, value)

    def _broadcast(self, node: fx.Node, dim: int, value: int) -> Any:
        rank, sizes = len(node.meta["spec"].shape), []
        for operand in node.args:
            own = dim - rank + (_rank(operand) or 0)
            if isinstance(operand, fx.Node) and _rank(operand) is not None and own >= 0:
                sizes.append((operand, own, operand.meta["spec"].shape[own]))
        traced = [self.assumed(operand, own, size) for operand, own, size in sizes if size == value]
        known = [size for size in traced if size is not None]
        if not known or (value == 1 and len(known) < len(sizes)):
            return None
        for size in known if value == 1 else known[:1]:  # one that is not 1 is the size of the result
            if scalar_of(size) is not None:
                bool(size == 1)  # a guard
        return known[0]

    def _inferred(self, source: fx.Node, sizes: tuple[Any, ...], value: int) -> Any:
        """Return the size for ``-1`` in a view: the product of the source's sizes divided by the given sizes."""
        spec = source.meta.get("spec")
        left = [self.size(source, dim, n) for dim, n in enumerate(getattr(spec, "shape", ()))]
        scalars = [s.node if (s := scalar_of(size)) else size for size in left]
        constant = math.prod(size for size in scalars if isinstance(size, int))
        symbols = [size for size in scalars if isinstance(size, fx.Node)]
        for size in sizes:
            if isinstance(size, fx.Node):
                if size not in symbols:
                    return None
                symbols.remove(size)
            elif size != -1:
                if constant % size:
                    return None
                constant //= size
        if not symbols:
            return constant if constant == value else None
        return self._as_size(symbols[0], value) if len(symbols) == 1 and constant == 1 else None

    def _through_slice(self, node: fx.Node, parent: fx.Node, dim: int, value: int) -> Any:
        """Return the length ``n`` of ``x[:, :, :n]`` or ``x[:, :, -n:]`` if it is proved, else None."""
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        part = index[dim] if dim < len(index) and all(isinstance(item, slice) for item in index) else None
        if not isinstance(part, slice):
            return None
        length = sliced_length(self, parent, dim, part)
        if length is None:
            return None
        if part.stop is None:
            bool(symbolic(self.tracer, length, value) > 0)  # a guard: x[-0:] is all of x
        return self._as_size(length, value)

    def _through_getitem(self, node: fx.Node, dim: int, value: int) -> Any:
        """Trace a size through an index, or an item of a cache update, ``x.split(…, dim=k)`` or ``x.chunk(…)``."""
        parent, rank = node.args[0], len(node.meta["spec"].shape)
        if isinstance(parent, fx.Node) and parent.meta.get("opaque") and isinstance(node.args[1], int):
            given = parent.args[1 + node.args[1]] if len(parent.args) > 1 + node.args[1] else None
            lengthened = dim >= rank - 2 or parent.target not in LENGTHENING
            return None if lengthened else self._from(given, dim, value)
        if isinstance(parent, fx.Node) and _rank(parent) is not None:
            dims = dims_of_result(node.args[1], _rank(parent) or 0)
            at = dims[dim] if dims is not None and dim < len(dims) else None
            if at == ADDED:
                return 1
            return self._through_slice(node, parent, dim, value) if at is None else self._from(parent, at, value)
        if isinstance(parent, fx.Node) and parent.target in ("split", "chunk", torch.split, torch.chunk):
            return self._through_split(node, parent, dim, value)
        if isinstance(parent, fx.Node) and parent.target in ("unbind", torch.unbind):
            along = parent.kwargs.get("dim", parent.args[1] if len(parent.args) > 1 else 0)
            return self._from(parent.args[0], dim + (dim >= along % (rank + 1)), value) if type(along) is int else None
        return None

    def _through_split(self, node: fx.Node, parent: fx.Node, dim: int, value: int) -> Any:
        rank = len(node.meta["spec"].shape)
        along = parent.kwargs.get("dim", parent.args[2] if len(parent.args) > 2 else 0)
        if not isinstance(along, int):
            return None
        if along % rank == dim:
            lengths = parent.args[1] if len(parent.args) > 1 else None
            number: Any = node.args[1]
            return self._as_size(lengths[number], value) if isinstance(lengths, (list, tuple)) else None
        return self._from(parent.args[0], dim, value)


def _computes_as(child: nn.Module, cls: type[nn.Module]) -> bool:
    return isinstance(child, cls) and type(child).forward is cls.forward


def _is_leading(node: fx.Node, name: str, dim: int, rank: int) -> bool:
    """Check whether ``dim`` is a dimension of rows of a product or a convolution."""
    if name == "linear" or (name == "matmul" and _rank(settings_of(node)[0]) == 2):
        return dim < rank - 1
    return name in _CONVOLUTIONS and dim == 0


def _rank(node: Any) -> int | None:
    spec = node.meta.get("spec") if isinstance(node, fx.Node) else None
    return getattr(spec, "ndim", None)


def _leading_slices(node: fx.Node, dim: int) -> bool:
    """Check whether ``x[..., a:b]`` leaves ``dim`` unchanged."""
    index = node.args[1]
    if not isinstance(index, tuple) or not index or index[0] is not Ellipsis:
        return False
    rank = len(node.meta["spec"].shape)
    return all(isinstance(item, slice) for item in index[1:]) and dim < rank - (len(index) - 1)
