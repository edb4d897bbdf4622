"""Naming and copying what is inside structures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from schedule.util.named_values import call, container_types, copied, full, named_tensors, named_values, shapes_of
from schedule.verify.observe import loss_of
from tests.zoo import CACHE


@dataclass
class Pair:
    left: Any
    right: Any


def test_names_lead_to_every_tensor() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    x = torch.ones(2)
    output = CausalLMOutputWithPast(logits=x, **{CACHE: cache}, hidden_states=(x, Pair(x, None)))
    assert list(named_tensors(output)) == [
        "logits",
        f"{CACHE}.layers.0.keys",
        f"{CACHE}.layers.0.values",
        "hidden_states.0",
        "hidden_states.1.left",
    ]
    assert named_values(output)["hidden_states.1.right"] is None
    assert list(named_values(x)) == ["output"]
    assert container_types((x, {"a": None})) == "tuple[Tensor, dict[a: NoneType]]"


def test_cycles_end() -> None:
    class Node:
        def __init__(self) -> None:
            self.me, self.x = self, torch.ones(1)

    assert list(named_tensors({"node": Node()})) == ["node.x"]


def test_copies_require_gradients_and_share_nothing() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    batch = {"x": torch.ones(2, requires_grad=True) * 2, "ids": torch.arange(3), "cache": cache}
    copy, leaves = copied(batch)
    assert list(leaves) == ["x", "cache.layers.0.keys", "cache.layers.0.values"]
    copy["x"].add_(1)  # a leaf that requires a gradient could not be changed in place
    copy["x"].sum().backward()
    assert leaves["x"].grad.tolist() == [1.0, 1.0] and batch["x"].tolist() == [2.0, 2.0]
    assert isinstance(copy["cache"], DynamicCache) and copy["cache"] is not cache
    assert copy["ids"].data_ptr() != batch["ids"].data_ptr()


def test_calling_by_keyword_position_or_alone() -> None:
    class Two(nn.Module):
        def forward(self, a: Any, b: Any = None) -> Any:
            return a, b

    assert call(Two(), {"b": 1, "a": 2}) == (2, 1)
    assert call(Two(), (1, 2)) == (1, 2)
    assert call(Two(), 3) == (3, None)
    assert shapes_of({"ids": torch.ones(2, 3)}) == "ids [2, 3]"


def test_the_loss_sees_what_a_sum_would_not() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    loss = loss_of({"probabilities": x.softmax(-1), "count": 3})
    loss.backward()
    assert float(x.grad.abs().max()) > 1e-3
    assert loss_of({"a": torch.ones(2)}) is None
    y = torch.tensor([float("-inf"), 1.0], requires_grad=True)
    assert torch.isfinite(loss_of(y * 1.0))


def test_full_gathers_a_dtensor_and_passes_others() -> None:
    class Sharded:
        def full_tensor(self) -> str:
            return "whole"

    x = torch.ones(2)
    assert full(x) is x
    assert full(Sharded()) == "whole"  # type: ignore[arg-type]
