"""Viewless tensors: their memory can be freed while their autograd graph stays alive.

A pipeline stage sends its output on and then needs only its autograd graph, not its data: it frees the data by
replacing it with one element. With a view that would free nothing, since its base holds the memory as well. ::

    out = make_viewless_tensor(stage(x), requires_grad=True, keep_graph=True)
    send(out)
    deallocate_output(out)
    ...
    backward_from_deallocated(out, received_gradient)

Source: Megatron-LM ``core.utils`` and ``core.pipeline_parallel.schedules``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge

from fused.backends.tracing import transformed
from fused.checks import shape

Tensor = torch.Tensor
T = TypeVar("T")


class MakeViewlessTensor(torch.autograd.Function):
    """Autograd function to make a viewless tensor in the same memory: ``MakeViewlessTensor.apply(inp, requires_grad)``.

    Args:
        inp: a tensor of any shape and dtype.
        requires_grad: whether the result requires a gradient. If so, and `inp` requires a gradient, the gradient of
            the result is passed to `inp` unchanged.

    Returns:
        A tensor with the storage, shape and strides of `inp`, with ``_base is None`` and a separate version
        counter: autograd does not detect writes to one of the two that invalidate saved data of the other.

    Raises:
        TypeError: if `inp` is not a tensor.
        ValueError: if a gradient is requested for a dtype that cannot have one.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Make the viewless tensor, as described in the class docstring."""
        inp, requires_grad = args
        _check(inp, requires_grad)
        out = super().apply(inp, requires_grad)
        # Autograd returns a result without gradient if the input has none.
        return out if out.requires_grad == requires_grad else out.detach().requires_grad_(requires_grad)

    @staticmethod
    def forward(inp: Tensor, requires_grad: bool) -> Tensor:
        return inp.data

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return `inp` itself if it is not a view, else a viewless tensor with the same data, memory and strides.

    Args:
        inp: a tensor of any shape and dtype.
        requires_grad: whether the result requires a gradient.
        keep_graph: True to pass gradients on to `inp`; False for a leaf.

    Returns:
        `inp`, or a tensor as from `MakeViewlessTensor`. While tracing and in `torch.func` transforms always `inp`,
        because tensors have no separate memory there.

    Raises:
        TypeError: if `inp` is not a tensor.
        ValueError: if a gradient is requested for a dtype that cannot have one.
    """
    if transformed(inp):
        return inp
    _check(inp, requires_grad)
    if inp._base is None and inp.requires_grad == requires_grad:
        return inp
    if inp._base is None and inp.is_leaf:
        return inp.requires_grad_(requires_grad)
    if keep_graph and requires_grad:
        out: Tensor = MakeViewlessTensor.apply(inp, requires_grad)
        return out
    return inp.data.requires_grad_(requires_grad)


def assert_viewless_tensor(tensor: T, extra_msg: str | None = None) -> T:
    """Return `tensor` if it is not a view and, for nested lists and tuples, contains no view.

    Args:
        tensor: a tensor of any shape, a list or tuple of anything, or any other object, which passes.
        extra_msg: added to the error.

    Raises:
        ValueError: for the first view found, with its shape and the shape of its base.
    """
    if isinstance(tensor, list | tuple):
        for one in tensor:
            assert_viewless_tensor(one, extra_msg)
    elif isinstance(tensor, Tensor) and tensor._base is not None:
        raise ValueError(
            f"assert_viewless_tensor: the tensor {shape(tensor)} is a view of one of {shape(tensor._base)}, which "
            "holds the memory: setting its data would free nothing. Pass it through make_viewless_tensor first."
            + (f" {extra_msg}" if extra_msg else "")
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Set ``tensor.data = new_data_tensor`` for a tensor other than a view.

    Args:
        tensor: keeps its position in the graph.
        new_data_tensor: of any shape, with the dtype and device of `tensor`.

    Raises:
        ValueError: if `tensor` is a view.
    """
    assert_viewless_tensor(tensor, f"The new data has shape {shape(new_data_tensor)}.")
    tensor.data = new_data_tensor


def deallocate_output(out: Tensor | None) -> None:
    """Free the memory of a stage's output after it was sent on, keeping its graph and one element.

    The memory is freed if nothing else references it, for example a backward pass that needs the output's data.

    Args:
        out: the output, of any shape and dtype; None is ignored.

    Raises:
        TypeError: if `out` is not a plain tensor: free the local shard of a DTensor.
        ValueError: if `out` is a view.
    """
    if out is None:
        return
    if type(out) not in (Tensor, torch.nn.Parameter):
        raise TypeError(f"deallocate_output: a plain tensor has memory to free, not {type(out).__name__}")
    safely_set_viewless_tensor_data(out, out.new_empty(1))


def backward_from_deallocated(out: Tensor, grad: Tensor | None = None) -> None:
    """Run ``out.backward(grad)``, even if the data of `out` has been freed.

    Args:
        out: a tensor, with or without a previous `deallocate_output`.
        grad: ``[...]``, the original shape of `out`; None for an output of one number.

    Raises:
        RuntimeError: if `grad` does not have that shape.
        ValueError: if `out` has no autograd graph.
    """
    if out.grad_fn is None:
        raise ValueError(
            f"backward_from_deallocated: the output {shape(out)} has no graph: it was computed without a gradient, "
            "or detached"
        )
    # The edge stores the shape that the output had when it was computed.
    torch.autograd.backward(get_gradient_edge(out), grad)


def _check(inp: object, requires_grad: bool) -> None:
    if not isinstance(inp, Tensor):
        raise TypeError(f"make_viewless_tensor: the input must be a tensor, got {type(inp).__name__}")
    if requires_grad and not (inp.is_floating_point() or inp.is_complex()):
        raise ValueError(
            f"make_viewless_tensor: numbers of {inp.dtype} have no gradient; pass requires_grad=False for the "
            f"tensor {shape(inp)}"
        )
