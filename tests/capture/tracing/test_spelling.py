"""Names that Python cannot spell as attributes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import schedule
from schedule import Recipe, TraceError

X = torch.linspace(-2, 2, 16).reshape(2, 8)


class Named(nn.Module):
    """Its module, parameter and buffer have one name, but for a digit."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.body = nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.GELU())})
        self.register_parameter(name, nn.Parameter(torch.full((8,), 2.0)))
        self.register_buffer(name + "2", torch.full((8,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = getattr(self, self.name), getattr(self, self.name + "2")
        return self.body[self.name](x) * scale + shift


@pytest.mark.parametrize("name", ['a"b', "class", "a\\b", "a\nb", "e\u0301", "{x}", "a*b", "1"])
def test_any_name(name: str) -> None:
    torch.manual_seed(0)
    model = Named(name)
    expected = model(X)
    sch = schedule.create_schedule(model, X)
    assert schedule.optimize(sch, rules="bias_activation", cost_guard=False).applied
    sch[f"body.{name}"].checkpoint()
    twin = schedule.replay(Named(name), Recipe.from_json(sch.recipe().to_json()), X)
    assert twin.recipe() == sch.recipe()
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(again(X), expected) and again.state_dict().keys() == Named(name).state_dict().keys()
    sch.undo().undo().trace(flatten=True)
    assert torch.allclose(model(X), expected)


class Keywords(nn.Module):
    """Calls a module with a keyword of any text."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.inner = nn.GELU(), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.inner(x, **{"class": x}))


class Scaled(nn.Module):
    """Takes it."""

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch.relu(x * given["class"])


def test_a_keyword_argument_that_no_call_can_name() -> None:
    sch = schedule.create_schedule(Keywords(), X)
    with pytest.raises(TraceError, match="keyword argument 'class'") as caught:
        sch.trace()
    assert "test_spelling.py" in caught.value.where and caught.value.fix
    sch["inner"].trace()
    assert torch.equal(sch.module(X), Keywords()(X))


class Power(nn.Module):
    """Powers of one number, by a tensor and by a size."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("steps", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.base**self.steps + round(self.base) ** x.shape[0]


@pytest.mark.parametrize("base", [-1, -2.0, -0.5, 3, -0.0])
def test_powers_of_a_number(base: float) -> None:
    model = Power(base)
    expected = [model(x) for x in (X, X[:1])]
    schedule.create_schedule(model, X).trace()
    torch.testing.assert_close([model(x) for x in (X, X[:1])], expected)
