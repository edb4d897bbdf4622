"""Gated activations of the halves of one tensor, in either order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused
from fused.gated import gated_halves


def gate_second(y: Tensor) -> Tensor:
    up, gate = y.chunk(2, dim=-1)
    return up * F.gelu(gate)


def ours(y: Tensor) -> Tensor:
    return gated_halves(y, "gelu", gate_first=False)


@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 48), (2, 3, 4, 32), (16,)])
def test_the_gate_may_be_the_second_half(backend: str, shape: tuple[int, ...]) -> None:
    y = torch.randn(shape, requires_grad=True)
    g = torch.randn(*shape[:-1], shape[-1] // 2)
    with fused.backend(backend):
        torch.testing.assert_close(ours(y), gate_second(y))
        (found,) = torch.autograd.grad(ours(y), y, g)
    (expected,) = torch.autograd.grad(gate_second(y), y, g)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()


def test_strides_of_the_input_do_not_matter() -> None:
    y = torch.randn(32, 6, 5).permute(1, 2, 0).requires_grad_()
    g = torch.randn(6, 5, 16)
    with fused.backend("inductor"):
        (found,) = torch.autograd.grad(ours(y), y, g)
    torch.testing.assert_close(found, torch.autograd.grad(gate_second(y), y, g)[0])


def test_first_and_second_derivatives() -> None:
    y = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, (y,))
    assert torch.autograd.gradgradcheck(ours, (y,))


@pytest.mark.parametrize("function", [ours, lambda y: gated_halves(y, "gelu")])
def test_only_the_whole_tensor_is_saved(function: Callable[[Tensor], Tensor]) -> None:
    y = torch.randn(4, 64, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(y)
    assert [each.data_ptr() for each in kept] == [y.data_ptr()]


def test_the_gradient_is_not_joined_by_a_copy() -> None:
    y, g = torch.randn(512, 512, requires_grad=True), torch.ones(512, 256)
    with fused.backend("inductor"):
        ours(y).backward(g)  # compiles
        with torch.profiler.profile() as profiled:
            ours(y).backward(g)
    names = {event.key for event in profiled.key_averages()}
    assert "GateSecondBackward" in names
    assert "aten::cat" not in names
