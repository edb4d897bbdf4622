"""Deep copies that a forward makes of tensors and of objects that hold some."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import schedule
from fused.torch_internals.tensor_kinds import ObservingFakeMode


class Layer:
    """A layer of a cache: a number as a tensor, and what it keeps."""

    def __init__(self) -> None:
        self.window, self.kept = torch.tensor(3), None

    def update(self, x: Tensor) -> Tensor:
        self.kept = x if self.kept is None else self.kept + x
        return self.kept


class Inner(nn.Module):
    """Makes layers, copies them, and uses the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        layers = [Layer(), Layer()]
        layers += [copy.deepcopy(each) for each in layers]
        x = F.gelu(self.linear(x) + self.bias)
        with torch.no_grad():
            kept = copy.deepcopy({"x": x.detach()})["x"]
        return sum((each.update(x) for each in layers), kept)


class Outer(nn.Module):
    """Calls a module that makes deep copies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = Inner(), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.inner(x) + self.bias)


@pytest.mark.filterwarnings("error::schedule.FallbackWarning")
@pytest.mark.parametrize("kind", [Inner, Outer])
def test_a_forward_that_copies_what_it_made(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    for _ in range(3):  # a copy of all that a tensor without data refers to ended the process, later
        schedule.create_schedule(copy.deepcopy(model), torch.randn(2, 4)).trace()
        gc.collect()
    schedule.create_schedule(model, torch.randn(2, 4)).trace()
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), twin(x))


def test_a_deep_copy_of_a_tensor_without_data_has_the_same_mode() -> None:
    mode = ObservingFakeMode()
    with mode:
        tensor = torch.ones(3)
        assert copy.deepcopy(tensor).fake_mode is tensor.fake_mode is mode
