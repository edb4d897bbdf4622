"""Settings changed after scheduling, whatever holds them: what runs is what the forward would read now."""

from __future__ import annotations

import argparse
import copy
import pickle
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.runtime.scheduled import FallbackWarning, state_of
from tests.core.adapting.counting import X, fallbacks
from tests.small import Mlp


@dataclass
class Inner:
    scale: float = 1.0
    scales: list[float] = field(default_factory=lambda: [1.0])


@dataclass
class Config:
    scale: float = 1.0
    scales: list[float] = field(default_factory=lambda: [1.0, 2.0])
    inner: Inner = field(default_factory=Inner)


class Model(nn.Module):
    """Reads settings from all that may hold one."""

    of_class: ClassVar[list[float]] = [1.0]

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.bias = Mlp(16), nn.Parameter(torch.ones(16))
        self.scales, self.by_name, self.pair = [1.0, 2.0], {"x": 1.5}, (1.0, 2.0)
        self.act, self.number, self.kinds = F.silu, np.float32(2.0), {1, 2}
        self.nested = {"a": [1.0, {"b": 1.0}]}
        self.config = Config()
        self.space, self.arguments = types.SimpleNamespace(scale=1.0, scales=[1.0]), argparse.Namespace(scale=1.0)

    @property
    def factor(self) -> float:
        """What was set, as transformers' ``loss_function`` is found."""
        return self._factor if hasattr(self, "_factor") else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.mlp(x)) * self.scales[0] + self.by_name["x"] + self.pair[0] * float(self.number)
        for scale in self.scales:
            x = x * scale
        x = x * len(self.kinds) * self.nested["a"][0] * self.nested["a"][1]["b"]  # type: ignore[index]
        x = x * self.config.scale * self.config.scales[0] * self.config.inner.scale * self.config.inner.scales[0]
        x = x * self.space.scale * self.space.scales[0] * self.arguments.scale * self.of_class[0] * self.factor
        return F.gelu(x + self.bias)


CHANGES: dict[str, Callable[[Model], object]] = {
    "an item of a list": lambda model: model.scales.__setitem__(0, 3.0),
    "a longer list": lambda model: model.scales.append(3.0),
    "another list": lambda model: setattr(model, "scales", [3.0]),
    "an item of a dict": lambda model: model.by_name.__setitem__("x", 3.0),
    "another tuple": lambda model: setattr(model, "pair", (3.0,)),
    "a function": lambda model: setattr(model, "act", F.relu),
    "a number of numpy": lambda model: setattr(model, "number", np.float32(3.0)),
    "a set": lambda model: model.kinds.add(3),
    "a list in a dict": lambda model: model.nested["a"].__setitem__(0, 3.0),
    "a dict in a list": lambda model: model.nested["a"][1].__setitem__("b", 3.0),  # type: ignore[attr-defined]
    "a config": lambda model: setattr(model.config, "scale", 3.0),
    "a list of a config": lambda model: model.config.scales.__setitem__(0, 3.0),
    "a config in a config": lambda model: setattr(model.config.inner, "scale", 3.0),
    "a list in that": lambda model: model.config.inner.scales.__setitem__(0, 3.0),
    "another config": lambda model: setattr(model, "config", Config(scale=3.0)),
    "a namespace": lambda model: setattr(model.space, "scale", 3.0),
    "a list of a namespace": lambda model: model.space.scales.__setitem__(0, 3.0),
    "arguments": lambda model: setattr(model.arguments, "scale", 3.0),
    "what was not there": lambda model: setattr(model, "_factor", 3.0),
    "what the class had": lambda model: setattr(model, "of_class", [3.0]),
}


def pair() -> tuple[Model, Model]:
    torch.manual_seed(0)
    twin = Model()
    model = copy.deepcopy(twin)
    report = schedule.optimize(model, X, cost_guard=False)
    assert report.applied and state_of(model) is not None
    return model, twin


@pytest.mark.parametrize("name", CHANGES)
def test_what_runs_reads_what_is_there_now(name: str) -> None:
    model, twin = pair()
    unchanged = twin(X)
    torch.testing.assert_close(model(X), unchanged)
    CHANGES[name](model), CHANGES[name](twin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for training in (True, False):
            model.train(training), twin.train(training)
            torch.testing.assert_close(model(X), twin(X))
    assert not torch.allclose(twin(X), unchanged), "the change shows"


def test_unchanged_settings_hold_in_copies() -> None:
    model, twin = pair()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(each(X), twin(X))
        torch.testing.assert_close(each(X), twin(X))
        assert fallbacks(each) == 0


def test_a_list_that_the_forward_puts_a_tensor_into() -> None:
    """A number before the first training step: the two cannot be compared."""

    class Keeping(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.scales) and self.training:
                self.scales[1] = x.sum()  # type: ignore[call-overload]
            return F.gelu(self.mlp(x) + self.bias)

    torch.manual_seed(0)
    model = Keeping()
    twin = copy.deepcopy(model)
    assert schedule.optimize(model, X, cost_guard=False).applied
    torch.testing.assert_close(model.train()(X), twin.train()(X))


def test_layers_with_other_settings_do_not_share_a_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Model(), Model(), Model())
    model[1].scales[0] = model[2].config.inner.scales[0] = 5.0  # type: ignore[union-attr,index]
    twin = copy.deepcopy(model)
    schedule.optimize(model, X, cost_guard=False)
    torch.testing.assert_close(model(X), twin(X))
