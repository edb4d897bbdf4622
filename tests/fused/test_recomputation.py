"""Inputs of layers that are computed again in the backward pass: equal gradients, in any kind of call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils.checkpoint import checkpoint

import fused
from fused import recomputed_input
from fused.recomputation import Recomputation

Make = Callable[..., Tensor]
"""A fused op of x ``[2, 6, 8]``, a row ``[8]`` and a tensor like x."""

OPS: dict[str, Make] = {
    "layer_norm": lambda x, row, like: fused.layer_norm(x, row, row),
    "add_layer_norm": lambda x, row, like: fused.add_layer_norm(x, like, row, row)[0],
    "rms_norm": lambda x, row, like: fused.rms_norm(x, row, casting="gemma"),
    "add_rms_norm": lambda x, row, like: fused.add_rms_norm(x, like, row)[0],
    "adaptive_layer_norm": lambda x, row, like: fused.adaptive_layer_norm(x, like, row),
    "batch_norm": lambda x, row, like: fused.batch_norm(x, None, None, row[:6], row[:6], True),
    "batch_norm_relu": lambda x, row, like: fused.batch_norm(x, None, None, row[:6], None, True, activation="relu"),
    "batch_norm_silu": lambda x, row, like: fused.batch_norm(
        x, None, None, training=True, activation="silu", residual=like
    ),
    "running batch_norm": lambda x, row, like: fused.batch_norm(x, x.new_zeros(6), x.new_ones(6), row[:6], row[:6]),
    "group_norm": lambda x, row, like: fused.group_norm(x, 2, row[:6], activation="silu", scale=like[:, :, :1]),
    "bias_gelu": lambda x, row, like: fused.bias_gelu(x, row),
    "squared_relu": lambda x, row, like: fused.weighted_squared_relu(x, like[..., :1]),
    "gated": lambda x, row, like: fused.gated_activation(x, like, "silu"),
    "swiglu": lambda x, row, like: fused.bias_swiglu(torch.cat([x, like], -1), None, clamp_value=1.0),
}
SAVING_THEIR_RESULT: dict[str, Make] = {
    "bias_relu": lambda x, row, like: fused.bias_activation(x, row, "relu"),
    "batch_norm_add_relu": lambda x, row, like: fused.batch_norm(
        x, None, None, training=True, activation="relu", residual=like
    ),
    "sum of a norm": lambda x, row, like: fused.add_layer_norm(x, like, row, row)[1],
    "8 bits": lambda x, row, like: fused.swiglu(torch.cat([x, like], -1), fp8_input_store=True),
    "another op": lambda x, row, like: F.silu(x),
}


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, a row, a tensor like x and a weight ``[5, 8]``."""
    torch.manual_seed(0)
    return tuple(torch.randn(size, dtype=dtype).requires_grad_() for size in ((2, 6, 8), (8,), (2, 6, 8), (5, 8)))  # type: ignore[return-value]


def layer(y: Tensor, weight: Tensor) -> Tensor:
    return recomputed_input(F.linear, y, weight)


def readers(y: Tensor) -> int:
    """How often layers have saved a fused op's result only as something to be computed again."""
    recomputation = getattr(y.grad_fn, "recomputation", None)
    return recomputation.readers if isinstance(recomputation, Recomputation) else 0


def gradients(loss: Tensor, inputs: tuple[Tensor, ...], **options: Any) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, inputs, allow_unused=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_the_gradients_are_those_of_the_saved_input_to_the_bit(name: str, dtype: torch.dtype) -> None:
    x, row, like, weight = operands(dtype)
    y = OPS[name](x, row, like)
    saved = gradients(F.linear(y, weight).square().sum(), (x, row, like, weight))
    y = OPS[name](x, row, like)
    z = layer(y, weight)
    is_exact = not name.startswith("batch_norm") or dtype == torch.float32  # the statistics in 16 bits are not kept
    assert readers(y) == is_exact
    alive = weakref.ref(y)
    del y
    assert (alive() is None) == is_exact
    assert all(
        a is b is None or torch.equal(a, b)
        for a, b in zip(gradients(z.square().sum(), (x, row, like, weight)), saved, strict=True)
    )


@pytest.mark.parametrize("name", SAVING_THEIR_RESULT)
def test_nothing_is_computed_again_without_a_gain(name: str) -> None:
    x, row, like, weight = operands(torch.float32)
    y = SAVING_THEIR_RESULT[name](x, row, like)
    layer(y, weight).sum().backward()
    assert readers(y) == 0 and weight.grad is not None


@pytest.mark.parametrize("name", OPS)
def test_any_number_of_derivatives(name: str) -> None:
    def pair(x: Tensor, row: Tensor, like: Tensor, weight: Tensor) -> Tensor:
        return layer(OPS[name](x, row, like), weight)

    assert torch.autograd.gradcheck(pair, operands(), fast_mode=True)
    assert torch.autograd.gradgradcheck(pair, operands(), fast_mode=True)


def test_a_convolution_of_channels_last() -> None:
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(3, 4, 3, 3).requires_grad_()
    y = fused.batch_norm(x, None, None, training=True, activation="relu")
    expected = gradients(F.conv2d(y, weight, padding=1).square().sum(), (x, weight), retain_graph=True)
    found = gradients(recomputed_input(F.conv2d, y, weight, padding=1).square().sum(), (x, weight))
    assert readers(y) == 1 and all(map(torch.equal, found, expected))  # type: ignore[arg-type]


def test_views_and_several_readers_share_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    x, row, _, weight = operands()
    y = fused.layer_norm(x, row, row)
    views = (y, y.view(-1, 8), y.transpose(0, 1), y[:, 1:3], y[0, 0])
    loss = sum((layer(view, weight).square().sum() for view in views), torch.zeros(()))
    again: Any = y.grad_fn.recomputation  # type: ignore[union-attr]
    computed: list[int] = []
    compute = again._compute
    monkeypatch.setattr(again, "_compute", lambda *saved: computed.append(1) or compute(*saved))
    plain = sum((F.linear(view, weight).square().sum() for view in views), torch.zeros(()))
    expected = gradients(plain, (x, weight), retain_graph=True)
    for times in (1, 2):
        found = gradients(loss, (x, weight), retain_graph=times == 1)
        assert len(computed) == times and again._result is None
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_part_of_the_readers_computes_it_too() -> None:
    x, row, _, weight = operands()
    y = fused.rms_norm(x, row)
    first, second = layer(y, weight), layer(y, weight * 2)
    alone = gradients(first.square().sum(), (weight,), retain_graph=True)
    both = gradients(first.square().sum() + second.sum(), (weight,))
    expected = F.linear(y, weight)
    torch.testing.assert_close(alone, gradients(expected.square().sum(), (weight,)))
    torch.testing.assert_close(both[0], alone[0] + 2 * y.detach().sum((0, 1)).expand(5, 8))


def test_changes_in_place() -> None:
    """A result changed before is saved; changed afterwards, it is the result of before that counts."""
    x, row, _, weight = operands()
    for changed in (lambda y: y.mul_(2), lambda y: y.view(-1).mul_(2), lambda y: y.detach().mul_(2)):
        y = fused.layer_norm(x, row, row)
        changed(y)
        layer(y, weight).sum().backward()
        assert readers(y) == 0
    y = fused.layer_norm(x, row, row)
    z, expected = layer(y, weight), gradients(F.linear(y, weight).square().sum(), (weight,), retain_graph=True)
    y.mul_(2)
    torch.testing.assert_close(gradients(z.square().sum(), (weight,)), expected)
    z = layer(fused.layer_norm(x, row, row), weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"inplace operation: \[8, 5\] of torch.float64 is at version 1"):
        z.sum().backward()
    z = layer(fused.layer_norm(x, row, row), weight)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_under_checkpointing_and_other_hooks() -> None:
    x, row, _, weight = operands()

    def block(x: Tensor) -> Tensor:
        y = fused.bias_gelu(layer(fused.layer_norm(x, row, row), weight), None)
        return layer(y, weight.t())

    expected = gradients(block(x).square().sum(), (x, row, weight))
    found = [gradients(checkpoint(block, x, use_reentrant=False).square().sum(), (x, row, weight))]
    with save_on_cpu():
        loss = block(x).square().sum()
    found.append(gradients(loss, (x, row, weight)))
    with disable_saved_tensors_hooks("not here"):
        found.append(gradients(block(x).square().sum(), (x, row, weight)))
    for each in found:
        assert all(map(torch.equal, each, expected))  # type: ignore[arg-type]


def test_the_backend_is_that_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    x, row, _, weight = operands()
    seen: list[str | None] = []
    run = fused.backends.OPS["layer_norm"].run  # type: ignore[attr-defined]
    monkeypatch.setattr(
        fused.backends.OPS["layer_norm"],  # type: ignore[attr-defined]
        "run",
        lambda part, args, request=None, **rest: seen.append(request) or run(part, args, request, **rest),
    )
    with fused.backend("reference"):
        z = layer(fused.layer_norm(x, row, row), weight)
    with fused.backend("inductor"):
        z.sum().backward()
    assert seen == ["reference"] * 3


def test_what_needs_plain_calls() -> None:
    x, row, _, weight = operands(torch.float32)

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return layer(fused.layer_norm(x, row, row), weight).square().sum()

    expected = gradients(f(x, weight), (x, weight))
    torch.testing.assert_close(torch.func.grad(f, (0, 1))(x, weight), expected)
    rows = torch.vmap(torch.func.grad(f), in_dims=(0, None))(x, weight)
    torch.testing.assert_close(rows, expected[0])
    with torch.no_grad():
        assert not f(x, weight).requires_grad
    y = fused.layer_norm(x, row, row)
    with torch.autocast("cpu", torch.bfloat16):
        layer(y, weight).sum().backward()
    assert readers(y) == 0  # what is saved is a copy in 16 bits


def test_under_the_compiler_it_is_a_plain_call() -> None:
    x, row, _, weight = operands(torch.float32)
    compiled = torch.compile(lambda x: layer(fused.layer_norm(x, row, row), weight), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(fused.layer_norm(x, row, row), weight))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_batch_norm_beside_parameters_in_float32_has_the_same_bits(dtype, backend):
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, 8).to(dtype).requires_grad_()
    rows = [torch.zeros(6), torch.ones(6), torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)]
    weight, results = torch.randn(5, 6, 1, 1, dtype=dtype, requires_grad=True), []
    for call in (torch.conv2d, lambda *args: recomputed_input(torch.conv2d, *args)):
        with fused.backend(backend):
            y = call(fused.batch_norm(x, *rows, training=True, activation="silu"), weight)
        results.append(torch.autograd.grad(y.square().sum(), weight)[0])
    assert torch.equal(*results)
