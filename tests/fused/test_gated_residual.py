"""The gated residual sum: gates, dtypes, strides, errors; `cases_gated_residual.py` has the quality lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fused
from fused.backends import inductor
from fused.backends.rows import merged_shapes
from tests.fused.cases_gated_residual import eager_gated_residual

Tensor = torch.Tensor
GATES = [(3, 1, 8), (1, 5, 1), (3, 5, 1), (5, 8), (8,), (1,), (), (3, 5, 8)]


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradients of what requires one."""
    result = function(*tensors)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return result, *torch.autograd.grad((result * weights).sum(), [t for t in tensors if t.requires_grad])


@pytest.mark.parametrize("shape", GATES, ids=str)
@pytest.mark.parametrize("needing", [(0, 1, 2), (2,), (1,), (0,)], ids=str)
def test_gates_of_any_shape_and_only_what_needs_a_gradient(shape: tuple[int, ...], needing: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(each, dtype=torch.float64) for each in ((3, 5, 8), (3, 5, 8), shape)]
    tensors = [tensor.requires_grad_(n in needing) for n, tensor in enumerate(drawn)]
    mine, theirs = gradients(fused.gated_residual, *tensors), gradients(eager_gated_residual, *tensors)
    torch.testing.assert_close(mine, theirs)


def test_the_value_is_saved_for_the_gate_alone(saved_bytes: Callable[[Callable[[], Tensor]], int]) -> None:
    residual, value, gate = (torch.randn(2, size, 8, requires_grad=True) for size in (5, 5, 1))
    assert saved_bytes(lambda: fused.gated_residual(residual, value, gate)) == value.nbytes + gate.nbytes
    assert saved_bytes(lambda: fused.gated_residual(residual, value, gate.detach())) == gate.nbytes


@pytest.mark.parametrize("shapes", [((5, 8), (3, 5, 8), (8,)), ((3, 5, 8), (1, 5, 8), (3, 1, 8))], ids=str)
def test_what_makes_the_sum_larger_is_left_to_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch.testing.assert_close(gradients(fused.gated_residual, *tensors), gradients(eager_gated_residual, *tensors))


def test_the_dtypes_of_mixed_tensors() -> None:
    residual, value, gate = torch.randn(2, 5, 8), torch.randn(2, 5, 8).bfloat16(), torch.randn(2, 1, 8).bfloat16()
    for given in ((residual, value, gate), (residual.bfloat16(), value, gate.float()), (value, residual, gate)):
        tensors = [tensor.detach().requires_grad_() for tensor in given]
        mine, theirs = gradients(fused.gated_residual, *tensors), gradients(eager_gated_residual, *tensors)
        assert [t.dtype for t in mine] == [t.dtype for t in theirs]


def test_channels_last_images_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "run", lambda formula, args, statics, device: formula(*args, **statics))
    residual, value = (torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last) for _ in range(2))
    gate = torch.randn(6, 1, 1)
    tensors = [tensor.requires_grad_() for tensor in (residual, value, gate)]
    for backend in ("reference", "inductor"):
        with fused.backend(backend):
            mine = gradients(fused.gated_residual, *tensors)
        theirs = gradients(eager_gated_residual, *tensors)
        torch.testing.assert_close(mine, theirs)
        assert mine[0].stride() == theirs[0].stride()


@pytest.mark.parametrize(
    ("whole", "part", "merged"),
    [
        ((2, 5, 6, 8), (2, 1, 1, 8), ([2, 30, 8], [2, 1, 8])),
        ((2, 5, 6, 8), (5, 1, 1), ([2, 5, 48], [1, 5, 1])),
        ((1, 5, 8), (1, 1, 8), ([5, 8], [1, 8])),
        ((2, 5, 8), (2, 5, 8), ([80], [80])),
        ((1, 1), (), ([1], [1])),
    ],
)
def test_merged_shapes(whole: tuple[int, ...], part: tuple[int, ...], merged: tuple[list[int], list[int]]) -> None:
    assert merged_shapes(whole, part) == merged


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(3, 4), torch.ones(3, 4), torch.ones(5)), ValueError, "gate .* do not broadcast"),
        ((torch.ones(3, 5), torch.ones(3, 4), torch.ones(4)), ValueError, "residual .* do not broadcast"),
        ((torch.ones(3, 4), torch.ones(3, 4), torch.ones(4, dtype=torch.int64)), TypeError, "gate must be float16"),
        ((torch.ones(3, 4), torch.ones(3, 4), torch.ones(4, device="meta")), ValueError, "on meta"),
        ((torch.ones(3, 4), 2.0, torch.ones(4)), TypeError, "value must be a tensor"),
    ],
)
def test_errors(arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fused.gated_residual(*arguments)
