"""Every way of rewriting is done again in the graphs of further kinds of calls, and undone there."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import schedule
from schedule.runtime.scheduled import FallbackWarning, state_of
from tests.core.adapting.counting import X, adaptations, fallbacks
from tests.small import Mlp, bias_gelu, ids, small


def fast(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A user's replacement."""
    fast.calls += 1  # type: ignore[attr-defined]
    return F.gelu(x + bias, approximate="tanh")


def projection(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def qkv(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three products as one."""
    fast.calls += 1  # type: ignore[attr-defined]
    return F.linear(x, torch.cat(weights)).chunk(len(weights), dim=-1)


class Fast(nn.Module):
    """A replacement that is a module."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return fast(x, bias)


def _fuse(sch: Any) -> None:
    sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find(bias_gelu, expect=2))


def _compile(sch: Any) -> None:
    sch["blocks.*.mlp"].fuse(sch["blocks.*.mlp"].find(bias_gelu), compiler=None)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    fast.calls = 0  # type: ignore[attr-defined]


def _replace(sch: Any) -> None:
    sch["blocks.*.mlp"].replace(fast, sch["blocks.*.mlp"].find(bias_gelu))


def _replace_by_module(sch: Any) -> None:
    sch["blocks.*.mlp"].replace(Fast(), sch["blocks.*.mlp"].find(bias_gelu))


def _merge(sch: Any) -> None:
    attn = sch["blocks.*.attn"]
    for name in ("q", "k", "v"):
        attn[name].decompose()
    weights = [[m for m in group if m.source] for group in attn.find_parallel(projection)]
    attn.replace(qkv, weights)


def _decompose_and_replace(sch: Any) -> None:
    sch["blocks.*.mlp.fc1"].decompose()
    _replace(sch)


def _trace_and_replace(sch: Any) -> None:
    sch["blocks.*"].trace(flatten=True)
    sch["blocks.*"].replace(fast, sch["blocks.*"].find(bias_gelu))


WAYS = [_fuse, _compile, _replace, _replace_by_module, _merge, _decompose_and_replace, _trace_and_replace]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", ["", "deepcopy", "pickle"])
def test_rewrites_are_made_again(way: Callable[[Any], None], copied: str) -> None:
    fast.calls = 0  # type: ignore[attr-defined]
    model, twin = small().eval(), small().eval()
    way(schedule.create_schedule(model, ids()))
    if copied == "deepcopy":
        model = copy.deepcopy(model)
    elif copied == "pickle":
        model = pickle.loads(pickle.dumps(model))
    model.double(), twin.double()
    torch.testing.assert_close(model(**ids()), twin(**ids()))
    assert adaptations(model) == 2 and fallbacks(model) == 0
    if way not in (_fuse, _compile):
        calls = fast.calls  # type: ignore[attr-defined]
        model(**ids(3, 4))
        assert fast.calls == calls + 2, "the replacement runs"  # type: ignore[attr-defined]


def test_matches_picked_by_hand_are_not_guessed() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.b(F.gelu(self.a(x), approximate="tanh")), approximate="tanh")

    model = Two()
    sch = schedule.create_schedule(model, X)
    sch.replace(fast, sch.find(bias_gelu, expect=2)[:1])
    twin = Two().double()
    twin.load_state_dict(model.state_dict())
    model.double()
    with pytest.warns(FallbackWarning, match="1 of the 2 matches of bias_gelu were picked by hand"):
        got = model(X.double())
    torch.testing.assert_close(got, twin(X.double()))
    report = schedule.Report([], model)
    assert report.fallbacks == {"": 1} and "picked by hand" in report.declined[""][0]
    assert "were picked by hand" in " ".join(str(report).split())
    model(X.double())
    assert len(state_of(model).adaptations) == 1, "tried once"  # type: ignore[union-attr]


def test_undo_takes_adapted_graphs_away() -> None:
    model, twin = small().eval(), small().eval()
    sch = schedule.create_schedule(model, ids())
    _replace(sch)
    model.double(), twin.double()
    fast.calls = 0  # type: ignore[attr-defined]
    model(**ids())
    assert fast.calls > 0 and adaptations(model) == 2  # type: ignore[attr-defined]
    sch.undo()
    fast.calls = 0  # type: ignore[attr-defined]
    torch.testing.assert_close(model(**ids()), twin(**ids()))
    assert fast.calls == 0 and all(state_of(module) is None for module in model.modules())  # type: ignore[attr-defined]
    sch.redo()
    model(**ids())
    assert fast.calls > 0  # type: ignore[attr-defined]


def test_undo_of_one_rule_takes_it_from_adapted_graphs() -> None:
    class Late(Mlp):
        def forward(self, hidden: torch.Tensor, relu: bool = False) -> torch.Tensor:
            hidden = super().forward(hidden)
            return F.relu(self.fc1(hidden)) if relu else hidden

    model = nn.Sequential(Late(16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    sch = schedule.create_schedule(model, X)
    report = schedule.optimize(sch, cost_guard=False)
    assert report.applied == {"bias_gelu_tanh": 1, "bias_relu": 1}
    model[0](X, True)
    assert report.adapted["0"] == ["float32, True: bias_gelu_tanh × 1, bias_relu × 1"]
    sch.undo()
    model[0](X, True)
    assert report.adapted["0"] == ["float32, True: bias_gelu_tanh × 1"]


@pytest.mark.unwritable("the rule is not registered")
def test_a_rule_that_is_not_registered_does_not_survive_pickling() -> None:
    rule = next(rule for rule in schedule.list_rules() if rule.name == "bias_gelu_tanh")
    copied = schedule.Rule("mine", "mine", rule.patterns, rule.build)
    torch.manual_seed(0)
    model = Mlp(16)
    schedule.optimize(model, X, rules=[copied], cost_guard=False)
    twin = copy.deepcopy(model)
    twin.double()(X.double())
    assert adaptations(twin) == 1
    loaded = pickle.loads(pickle.dumps(model))
    with pytest.warns(FallbackWarning, match="not registered"):
        loaded.double()(X.double())


def test_layers_alike_are_adapted_once() -> None:
    model = small(4).eval()
    sch = schedule.create_schedule(model, ids())
    _replace(sch)
    model.double()(**ids())
    made = [state_of(block.mlp).adaptations for block in model.blocks]  # type: ignore[union-attr]
    assert all(len(each) == 1 and each[0] is made[0][0] for each in made)
    model.blocks[0].mlp.act.approximate = "none"
    twin = small(4).double().eval()
    twin.blocks[0].mlp.act.approximate = "none"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model(**ids()), twin(**ids()))
