"""Strides of results: those that the formulas have in eager torch, on every backend, so that views of them work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fused
from fused.backends import availability, inductor
from fused.backends.strides import memory_order
from tests.fused.cases_norms import eager_rms_norm
from tests.fused.cases_rotary import rotated_pairs

PRESERVED = {"memory_format": torch.preserve_format}
CONTIGUOUS = {"memory_format": torch.contiguous_format}
SHAPE = (2, 3, 5, 8)

ORDERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "heads transposed": ((0, 2, 1, 3),) * 2,
    "batch second": ((1, 0, 2, 3),) * 2,
    "features not last": ((0, 3, 1, 2),) * 2,
    "the first transposed": ((0, 2, 1, 3), (0, 1, 2, 3)),
    "the second transposed": ((0, 1, 2, 3), (0, 2, 1, 3)),
    "each another way": ((1, 0, 2, 3), (0, 2, 1, 3)),
}
"""Dimensions of the two operands from the slowest to the fastest in memory."""


def laid(order: tuple[int, ...]) -> Tensor:
    """Random numbers of `SHAPE` in this order in memory."""
    return torch.randn([SHAPE[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def eager_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    return x * cos + rotated_pairs(x, interleaved) * sin


def rotated(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Any:
    cos, sin = w.expand(5, 8), b.expand(5, 8)
    return fused.rotary_embedding(x, y, cos, sin, unsqueeze_dim=None)


def paired(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Any:
    return fused.apply_rotary(x, w.expand(5, 8), b.expand(5, 8), interleaved=True)


def partly_rotated(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Any:
    return fused.apply_rotary(x, w.expand(5, 8)[:, :4], b.expand(5, 8)[:, :4])


def eager_partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((eager_rotary(x[..., :4], cos, sin), x[..., 4:]), -1)


def single_rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (8,), w, 1e-6)


def single_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (8,), w, b)


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gelu": (lambda x, y, w, b: fused.bias_gelu(x, b), lambda x, y, w, b: F.gelu(x + b, approximate="tanh")),
    "relu": (lambda x, y, w, b: fused.bias_activation(x, None, "relu"), lambda x, y, w, b: F.relu(x)),
    "two gated": (lambda x, y, w, b: fused.gated_activation(x, y, "gelu"), lambda x, y, w, b: F.gelu(x) * y),
    "one gated": (
        lambda x, y, w, b: fused.bias_swiglu(x, b),
        lambda x, y, w, b: F.silu((x + b)[..., :4]) * (x + b)[..., 4:],
    ),
    "rms": (lambda x, y, w, b: fused.rms_norm(x, w), lambda x, y, w, b: eager_rms_norm(x, w, 1e-6)),
    "rms called": (
        lambda x, y, w, b: fused.rms_norm(x, w, casting="torch", **CONTIGUOUS),
        lambda x, y, w, b: single_rms(x, w),
    ),
    "rms of a sum": (
        lambda x, y, w, b: fused.add_rms_norm(x, y, w),
        lambda x, y, w, b: (eager_rms_norm(x + y, w, 1e-6), x + y),
    ),
    "layer": (lambda x, y, w, b: fused.layer_norm(x, w, b, **PRESERVED), lambda x, y, w, b: written_layer(x, w, b)),
    "layer called": (lambda x, y, w, b: fused.layer_norm(x, w, b), lambda x, y, w, b: single_layer(x, w, b)),
    "layer of a sum": (
        lambda x, y, w, b: fused.add_layer_norm(x, y, w, b),
        lambda x, y, w, b: (single_layer(x + y, w, b), x + y),
    ),
    "dropout": (lambda x, y, w, b: fused.bias_dropout(x, b, 0.3), lambda x, y, w, b: F.dropout(x + b, 0.3)),
    "dropout and sum": (
        lambda x, y, w, b: fused.bias_dropout_add(y, b, x, 0.3),
        lambda x, y, w, b: x + F.dropout(y + b, 0.3),
    ),
    "rotary": (
        rotated,
        lambda x, y, w, b: (
            eager_rotary(x, w.expand(5, 8), b.expand(5, 8)),
            eager_rotary(y, w.expand(5, 8), b.expand(5, 8)),
        ),
    ),
    "partial": (partly_rotated, lambda x, y, w, b: eager_partial(x, w.expand(5, 8)[:, :4], b.expand(5, 8)[:, :4])),
    "interleaved": (paired, lambda x, y, w, b: eager_rotary(x, w.expand(5, 8), b.expand(5, 8), True)),
}


def written_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.square().mean(-1, keepdim=True) + 1e-5) * w + b


@pytest.fixture(params=["reference", "inductor", "triton"])
def on_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn, without a fallback to another."""
    if request.param == "inductor":
        request.getfixturevalue("warm_inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(availability, "warn_once", pytest.fail)
        with fused.backend(request.param):
            yield request.param


def outputs(function: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    results = function(*inputs)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.one_in(14)
@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize("name", PAIRS)
def test_results_have_the_strides_of_eager_torch(name: str, layout: str, on_backend: str) -> None:
    torch.manual_seed(0)
    op, eager = PAIRS[name]
    inputs = (*map(laid, ORDERS[layout]), torch.randn(8), torch.randn(8))
    expected = outputs(eager, *inputs)
    needing = [t.detach().requires_grad_() for t in inputs[:2]]
    for given in (inputs, (*needing, *inputs[2:])):
        for mine, theirs in zip(outputs(op, *given), expected, strict=True):
            assert mine.stride() == theirs.stride()
            torch.testing.assert_close(mine.detach(), theirs, rtol=1e-5, atol=1e-5)
            mine.mul_(2.0)  # which autograd refuses for views that a function returns


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_of_permuted_inputs(name: str, on_backend: str) -> None:
    torch.manual_seed(0)
    op, eager = PAIRS[name]
    inputs = (laid((1, 0, 2, 3)), laid((0, 2, 1, 3)), torch.randn(8), torch.randn(8))
    found = []
    for function in (op, eager):
        leaves = [t.detach().requires_grad_() for t in inputs[:2]]
        results = outputs(function, *leaves, *inputs[2:])
        incoming = [torch.linspace(-1, 1, out.numel()).view(out.shape).transpose(0, 1).contiguous() for out in results]
        grads = [g.transpose(0, 1) for g in incoming]
        found.append(torch.autograd.grad(results, leaves, grads, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("features", ["last", "not last"])
def test_what_is_elementwise_is_not_copied(features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = laid((0, 2, 1, 3) if features == "last" else (0, 2, 3, 1)), []

    def run(formula: Callable[..., Any], args: list[Any], statics: dict[str, Any], device: str) -> Any:
        seen.append(args[0])
        return formula(*args, **statics)

    monkeypatch.setattr(inductor, "run", run)
    with fused.backend("inductor"):
        assert fused.bias_activation(x, None, "mish").stride() == x.stride()
    assert seen[0].is_contiguous() and seen[0].data_ptr() == x.data_ptr()


def test_transforms_see_the_strides_of_eager_torch() -> None:
    x, w, b = laid((0, 2, 1, 3)), torch.randn(8), torch.randn(8)
    for op, eager in (PAIRS["rotary"], PAIRS["layer"], PAIRS["rms"]):
        compiled = torch.compile(op, backend="eager", fullgraph=True)
        for mine, theirs in zip(outputs(compiled, x, x, w, b), outputs(eager, x, x, w, b), strict=True):
            assert mine.stride() == theirs.stride()


def test_the_order_in_memory_is_torch_s() -> None:
    draws = random.Random(0)

    def drawn(shape: tuple[int, ...], narrow: float) -> Tensor:
        order = draws.sample(range(len(shape)), len(shape))
        whole = torch.empty([shape[dim] * draws.choice([1, 1, 2]) for dim in order])
        tensor = whole.permute([order.index(dim) for dim in range(len(shape))])[tuple(map(slice, shape))]
        for dim in range(len(shape)):
            tensor = tensor.narrow(dim, 0, 1) if draws.random() < narrow else tensor
        return tensor.expand(shape) if draws.random() < 0.2 else tensor

    for rank, _ in itertools.product(range(1, 6), range(300)):
        shape = tuple(draws.choice([1, 2, 3, 3]) for _ in range(rank))
        operands = [drawn(shape, 0.0), *(drawn(shape, 0.3) for _ in range(draws.randint(0, 2)))]
        draws.shuffle(operands)
        total = torch.addcmul(*operands) if len(operands) == 3 else sum(operands[1:], operands[0] * 1)
        if len(operands) == 2:
            total = operands[0] + operands[1]
        assert total.permute(memory_order(operands)).is_contiguous()
