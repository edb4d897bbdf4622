"""Folded weights are computed once, after every change again, and packed for images with the channels last."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused
from fused.backends import folded_weights

LAYOUTS = (torch.contiguous_format, torch.channels_last)


@pytest.fixture(autouse=True)
def chosen_backend() -> Iterator[None]:
    with fused.backend("auto"):
        yield


def _layer(groups: int = 1, kernel: int = 3) -> tuple[nn.Parameter, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8 // groups, kernel, kernel) / 4, requires_grad=False)
    return weight, torch.randn(8), [torch.randn(8), *(torch.rand(8) + 0.5 for _ in range(3))]


def _eager(
    x: Tensor, weight: Tensor, bias: Tensor, norm: list[Tensor], residual: Tensor | None, **settings: Any
) -> Tensor:
    z = F.batch_norm(F.conv2d(x, weight, bias, **settings), *norm)
    return F.relu(z if residual is None else z + residual)


@pytest.mark.parametrize("residual", ["none", "alike", "contiguous", "broadcast"])
@pytest.mark.parametrize(
    "settings", [{}, {"stride": (2, 1), "padding": 1}, {"groups": 4, "dilation": 2}, {"padding": "same"}], ids=str
)
def test_cached_weights_give_values_and_strides_of_eager(settings: dict[str, Any], residual: str) -> None:
    weight, bias, norm = _layer(settings.get("groups", 1))
    for _, of_image, of_weight in itertools.product(range(2), LAYOUTS, LAYOUTS):
        weight.data = weight.data.contiguous(memory_format=of_weight)
        x = torch.randn(3, 8, 9, 7).contiguous(memory_format=of_image)
        x[0, :, 0, 0], x[1, 0, 5, 5] = math.nan, math.inf  # oneDNN's own ReLU gives 0 for NaN
        z = F.conv2d(x, weight, bias, **settings)
        added = {
            "none": None,
            "alike": torch.randn_like(z),
            "contiguous": torch.randn(z.shape),
            "broadcast": torch.randn(8, 1, 1),
        }[residual]
        expected = _eager(x, weight, bias, norm, added, **settings)
        ours = fused.conv_batch_norm(x, weight, bias, *norm, **settings, activation="relu", residual=added)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert ours.stride() == expected.stride()


def test_weights_are_packed_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []
    pack = folded_weights.Packing.pack
    monkeypatch.setattr(folded_weights.Packing, "pack", lambda self, w, sizes: packed.append(w) or pack(self, w, sizes))
    weight, bias, norm = _layer()
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
    images = (x, x[:1], x[..., :5, :].contiguous(memory_format=torch.channels_last))

    def times() -> int:
        before = len(packed)
        for image in images:
            ours = fused.conv_batch_norm(image, weight, bias, *norm, activation="relu")
            torch.testing.assert_close(ours, _eager(image, weight, bias, norm, None), rtol=1e-4, atol=1e-5)
        return len(packed) - before

    assert (times(), times()) == (1, 0)
    for changed in (weight, bias, *norm):
        changed.data.view(-1)[-1:].mul_(1.5)  # one number, and no version counter sees it
        assert (times(), times()) == (1, 0)
    weight.data = weight.data.clone()
    assert (times(), times()) == (1, 0)  # bound to the memory of the weight
    weight.data.neg_()
    assert times() == 1
    weight.requires_grad_()
    assert times() == 0  # nothing is folded


def test_weights_cached_in_inference_mode_are_used_with_gradients() -> None:
    weight, bias, norm = _layer()
    x = torch.randn(2, 8, 9, 9)
    with torch.inference_mode():
        fused.conv_batch_norm(x, weight, bias, *norm, activation="relu")
    x.requires_grad_()
    both = fused.conv_batch_norm(x, weight, bias, *norm, activation="relu"), _eager(x, weight, bias, norm, None)
    grads = [torch.autograd.grad(each.square().sum(), x)[0] for each in both]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_a_contiguous_image_may_give_channels_last() -> None:
    weight, bias, norm = _layer()
    shape = (3, 8, 9, 7)
    for sizes, is_free in ((shape, True), ((2, *shape[1:]), True), ((1, *shape[1:]), False), ((3, 8, 9, 9), False)):
        x = torch.randn(sizes)
        ours = fused.conv_batch_norm(x, weight, bias, *norm, activation="relu", channels_last=shape)
        torch.testing.assert_close(ours, _eager(x, weight, bias, norm, None), rtol=1e-4, atol=1e-5)
        assert ours.is_contiguous(memory_format=torch.channels_last) is is_free
        assert ours.is_contiguous() is not is_free


def test_a_residual_may_hold_the_result() -> None:
    weight, bias, norm = _layer()
    x = torch.randn(3, 8, 9, 7).to(memory_format=torch.channels_last)
    whole = torch.randn(3, 8, 7, 10).to(memory_format=torch.channels_last)
    for residual, written in ((whole[..., ::2].clone(), True), (whole[..., ::2], False), (whole[:1, :, :, :5], False)):
        expected = _eager(x, weight, bias, norm, residual)
        before = residual.clone()
        given = {"activation": "relu", "residual": residual, "out": residual}
        ours = fused.conv_batch_norm(x, weight, bias, *norm, **given)  # a backward pass may need the residual
        assert torch.equal(residual, before)
        with torch.no_grad():
            again = fused.conv_batch_norm(x, weight, bias, *norm, **given)
        for each in (ours, again):
            torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
            assert each.stride() == expected.stride()
        assert (again.data_ptr() == residual.data_ptr()) is written and torch.equal(residual, before) is not written
    with pytest.raises(ValueError, match="other than the residual"):
        fused.conv_batch_norm(x, weight, bias, *norm, out=torch.empty(3, 8, 7, 5))


def test_folded_weights_are_freed_with_the_parameter() -> None:
    weight, bias, norm = _layer()
    fused.conv_batch_norm(torch.randn(2, 8, 9, 9), weight, bias, *norm)
    count = len(folded_weights._CACHE)
    del weight
    assert len(folded_weights._CACHE) < count


def test_weights_can_be_swapped() -> None:
    """``torch.utils.swap_tensors`` refuses a tensor with weak references."""
    (weight, bias, norm), (other, *_), x = _layer(), _layer(kernel=1), torch.randn(2, 8, 9, 9)
    other.data.mul_(2)
    for _ in range(2):
        for each in (weight, other):
            ours = fused.conv_batch_norm(x, each, bias, *norm, activation="relu")
            torch.testing.assert_close(ours, _eager(x, each, bias, norm, None), rtol=1e-4, atol=1e-5)
        torch.utils.swap_tensors(weight, other)


def test_weights_in_one_storage_are_cached_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    folds: list[Tensor] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda self: folds.append(self) or clone(self))
    flat, (_, bias, norm), x = torch.randn(2, 8, 8, 3, 3), _layer(), torch.randn(2, 8, 9, 9)
    weights = [nn.Parameter(each, requires_grad=False) for each in flat]
    for _ in range(2):
        for weight in weights:
            ours = fused.conv_batch_norm(x, weight, bias, *norm, activation="relu")
            torch.testing.assert_close(ours, _eager(x, weight, bias, norm, None), rtol=1e-4, atol=1e-3)
    assert sum(any(each is weight for weight in weights) for each in folds) == 2


def test_bits_are_compared() -> None:
    one = torch.tensor([0.0, math.nan, 1.0])
    assert folded_weights.same_bits(one, one.clone()) and folded_weights.same_bits(None, None)
    for other in (torch.tensor([-0.0, math.nan, 1.0]), torch.tensor([0.0, 2.0, 1.0]), one[:2], one.double(), None):
        assert not folded_weights.same_bits(one, other)
