"""Layers that save how their input is computed, instead of the input.

A linear layer or a convolution saves its input for the gradient of its weight. Where that is the result of a fused op,
such as a norm or an activation, it can be computed again in the backward pass from what the op has saved anyway: the
same choice as that of ``torch.compile``'s min-cut partition between forward and backward, at each layer on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec

import torch
from torch.autograd.graph import saved_tensors_hooks

from fused.backends.selection import backend
from fused.backends.tracing import PLAIN, differentiated, transformed
from fused.torch_internals.modes import are_saved_tensor_hooks_enabled
from fused.torch_internals.tensor_kinds import storage_of

P = ParamSpec("P")
Tensor = torch.Tensor


def recomputed_input(
    function: Callable[Concatenate[Tensor, P], Tensor], input: Tensor, *args: P.args, **kwargs: P.kwargs
) -> Tensor:
    """Compute ``function(input, …)``, saving nothing for what can be computed again from other saved tensors.

    If the input, or the tensor that it is a view of, is the result of a fused norm, activation or gated activation,
    that op computes it once more in the backward pass, for all layers that read it. Otherwise, this is a plain call:
    for other inputs, where the op saves its result (ReLU after a bias) or only 8 bits of its input, after a change of
    the input in place, under compilers, which choose themselves what to save, `torch.func`, and for tensor subclasses.

    Args:
        function: such as ``F.linear`` or ``torch.conv2d``.
        input: its first argument; floating point, any shape.
        args, kwargs: its other arguments.

    Returns:
        The result of the function, differentiable any number of times. The input computed again has the same bits.

    Raises:
        RuntimeError: in the backward pass, if a saved tensor was changed in place, as torch does; or if an earlier
            backward pass without ``retain_graph`` freed what the op has saved.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost"; saved tensor hooks as in
    ``torch.autograd.graph.save_on_cpu``.
    """
    source = input if input._base is None else input._base
    is_plain = type(input) in PLAIN and not transformed() and are_saved_tensor_hooks_enabled()
    producer = source.grad_fn if is_plain and differentiated(input) else None
    recomputation = getattr(producer, "recomputation", None)
    if not isinstance(recomputation, Recomputation) or not recomputation.is_result(input, source):
        return function(input, *args, **kwargs)
    storage = storage_of(source)

    def pack(tensor: Tensor) -> Callable[[], Tensor | None]:
        if type(tensor) not in PLAIN or tensor.layout != torch.strided or storage_of(tensor) != storage:
            return partial(_unchanged, tensor.detach(), tensor._version)
        recomputation.readers += 1
        return partial(recomputation.view, producer, tensor.shape, tensor.stride(), tensor.storage_offset())

    with saved_tensors_hooks(pack, lambda packed: packed()):
        return function(input, *args, **kwargs)


def _unchanged(tensor: Tensor | None, version: int) -> Tensor | None:
    if tensor is not None and tensor._version != version:
        raise RuntimeError(
            "recomputed_input: a tensor needed for the gradient has been modified by an inplace operation: "
            f"{list(tensor.shape)} of {tensor.dtype} is at version {tensor._version}, expected version {version}"
        )
    return tensor


def _watched(tensors: Sequence[Tensor | None]) -> list[Callable[[], Tensor | None]]:
    return [partial(_unchanged, each, 0 if each is None else each._version) for each in tensors]


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return ``ctx.saved_tensors`` for the gradient, from the computation of the result if there was one.

    Hooks such as those of checkpointing unpack a tensor once in a backward pass.
    """
    recomputation = None if torch.compiler.is_compiling() else getattr(ctx, "recomputation", None)
    saved: tuple[Any, ...] = ctx.saved_tensors if recomputation is None else recomputation.take(ctx)
    return saved


class Recomputation:
    """Way to compute the first result of an autograd function again, kept as ``ctx.recomputation``.

    Args:
        result: as it is in the forward pass; not kept.
        compute: computes it from the saved tensors.
        backend: the requested one, or None for that of the device.
        others: further tensors for ``compute``, of no use to the gradient, such as a bias.

    Attributes:
        readers: how often layers have saved the result.
    """

    def __init__(
        self, result: Tensor, compute: Callable[..., Tensor], backend: str | None, others: Sequence[Tensor | None] = ()
    ) -> None:
        self.readers = 0
        self._version = result._version
        self._compute, self._backend = compute, backend
        self._left = 0
        self._result: Tensor | None = None
        self._saved: list[Callable[[], Tensor | None]] = []
        self._others = _watched(others)

    def is_result(self, input: Tensor, source: Tensor) -> bool:
        """Check whether the input reads the result ``source`` of the autograd function, as that returned it."""
        return source.output_nr == 0 and source._version == self._version and input.dtype == source.dtype

    def view(self, ctx: Any, size: Sequence[int], stride: Sequence[int], offset: Any) -> Tensor:
        """Return a view of the result of ``ctx``, which is held until the last of its readers has called this."""
        result = self._result
        if result is None:
            saved = self.take(ctx)
            self._saved = _watched(saved)
            with torch.no_grad(), backend(self._backend or "auto"):
                result = self._compute(*saved, *(each() for each in self._others))
            self._left = self.readers
        self._left -= 1
        self._result = result if self._left else None
        return result.as_strided(size, stride, offset)

    def take(self, ctx: Any) -> tuple[Any, ...]:
        """Return the saved tensors of ``ctx``, once as :meth:`view` has unpacked them."""
        saved, self._saved = self._saved, []
        return tuple(each() for each in saved) if saved else tuple(ctx.saved_tensors)
