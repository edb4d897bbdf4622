"""Calls that a forward makes in ways of its own: over several lines, cached, within blocks that choose a kernel."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import schedule


@functools.lru_cache(maxsize=4)
def positions(length: int) -> Tensor:
    return torch.linspace(0, 1, length)


class Resized(nn.Module):
    """Sizes that are data, given over several lines, where a trace has to find what the recorded run saw."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        height, width = grid[0]
        y = F.interpolate(
            self.fc(x),
            size=(height // 2, width // 2),
        )
        return (
            y.flatten()
            .view(
                height // 2,
                -1,
            )
            .sum()
        )


class Cached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + positions(8)


class Chosen(nn.Module):
    def __init__(self, backends: Any) -> None:
        super().__init__()
        self.fc, self.backends = nn.Linear(8, 8), backends

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        with sdpa_kernel(self.backends):
            return F.scaled_dot_product_attention(x, x, x)


def assert_traced(module: nn.Module, *inputs: Tensor) -> schedule.Schedule:
    sch = schedule.create_schedule(module, inputs)
    expected = module(*inputs)
    sch.trace(flatten=True)
    for made in sch.specializations:
        torch.testing.assert_close(made.function(module, *inputs), expected)
    return sch


def test_sizes_that_are_data_in_calls_over_several_lines() -> None:
    assert_traced(Resized(), torch.randn(1, 2, 8, 8), torch.tensor([[8, 4]]))


def test_tensors_that_a_cached_function_keeps() -> None:
    assert_traced(Cached(), torch.randn(3, 8))


@pytest.mark.parametrize("backends", [SDPBackend.MATH, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]])
def test_a_block_that_chooses_the_kernel_is_part_of_the_graph(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sch = assert_traced(Chosen(backends), torch.randn(2, 2, 4, 8))
    seen: list[bool] = []
    attention = F.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return attention(*args, **kwargs)

    for node in sch.graph.nodes:
        if node.target is attention:
            node.target = watched
    x = torch.randn(2, 2, 4, 8)
    torch.fx.Interpreter(torch.fx.GraphModule(sch.module, sch.graph)).run(x)
    assert seen == [isinstance(backends, list)] and torch.backends.cuda.flash_sdp_enabled()


class Joined(nn.Module):
    """Names what it looks up by numbers that it joins."""

    def __init__(self) -> None:
        super().__init__()
        self.version = [1, 2]
        self.factors = {"1.2": 2.0, "1.3": 3.0}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors[".".join(map(str, self.version))] + len("-".join(str(n) for n in self.version))


def test_strings_that_are_joined_from_what_an_iterator_yields() -> None:
    module, x = Joined(), torch.randn(2, 3)
    sch = assert_traced(module, x)
    assert all(made.guard_set.holds(module) for made in sch.specializations)
    module.version[1] = 3
    assert not any(made.guard_set.holds(module) for made in sch.specializations)


class Labeled(nn.Module):
    """Compares what may be a tensor with a string."""

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Any] = ["first", x]
        return sum((each for each in kept if each != "first"), x) * (2.0 if kept[1] == "first" else 3.0)


def test_a_tensor_equals_no_string() -> None:
    assert_traced(Labeled(), torch.randn(2, 3))
