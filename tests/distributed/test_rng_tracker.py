"""Random generators by name: what a block draws, in recomputations too, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import schedule
from schedule import NotApplicable, RNGStatesTracker


class Drops(nn.Module):
    """Dropout with the numbers of one name, then of another, then with those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.inside = RNGStatesTracker(), True
        self.rng.set_states({"first": 1, "second": 2})

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            return F.dropout(x, 0.5)
        with self.rng.fork("first"):
            x = F.dropout(x, 0.5)
            with self.rng.fork("second"):
                x = F.dropout(x, 0.5)
        return F.dropout(x, 0.5)


class Model(nn.Module):
    """Layers around the dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drops, self.down = nn.Linear(8, 64), Drops(), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.drops(self.up(x))))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def step(run: Any, model: nn.Module) -> list[Tensor]:
    """The result, the gradients and the numbers afterwards, from one seed."""
    torch.manual_seed(5)
    model.zero_grad()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    result = run(x)
    result.sum().backward()
    return [result, x.grad, *(p.grad.clone() for p in model.parameters()), torch.rand(3)]  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["the model", "a layer", "torch", "torch, reentrant"])
def test_a_recomputation_draws_the_same_numbers(how: str) -> None:
    model = Model()
    expected = step(model, model)
    if how.startswith("torch"):
        run: Any = lambda x: checkpoint(model, x, use_reentrant="reentrant" in how)  # noqa: E731
    else:
        run = model
        schedule.create_schedule(model)["" if how == "the model" else "drops"].checkpoint()
    assert all(map(torch.equal, expected, step(run, model)))
    model.drops.inside = False
    assert not torch.equal(expected[0], step(run, model)[0])


def test_blocks_go_on_and_a_copy_draws_the_same() -> None:
    rng = RNGStatesTracker()
    rng.add("a", 7)
    states = []
    for each in (rng, copy.deepcopy(rng), pickle.loads(pickle.dumps(rng))):
        torch.manual_seed(0)
        numbers = []
        for _ in range(3):
            with each.fork("a"):
                numbers.append(torch.rand(2))
        assert len({float(pair[0]) for pair in numbers}) == 3
        states.append(torch.stack([*numbers, torch.rand(2)]))
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_a_block_that_raises_leaves_the_state_outside_as_any_other() -> None:
    rng, after = RNGStatesTracker(), []
    rng.add("a", 7)
    for fails in (False, True):
        torch.manual_seed(0)
        try:
            with rng.fork("a"):
                torch.rand(3)
                assert not fails
        except AssertionError:
            pass
        after.append(torch.rand(2))
    assert torch.equal(*after)


def test_a_model_around_a_block_is_rewritten_and_the_block_is_not() -> None:
    model = Model()
    expected = step(model, model)
    sch = schedule.create_schedule(model, torch.ones(4, 8))
    sch.fuse(sch.find(gelu, expect=1), compiler=None)
    assert all(map(torch.equal, expected, step(model, model)))
    with pytest.raises(schedule.TraceError, match=r"a block of RNGStatesTracker\.fork"):
        sch["drops"].trace()


@pytest.mark.parametrize("states", [{"a": 1, "b": 1}, {"a": "1"}, {1: 1}, {"a": True}])
def test_states_that_make_no_sense_change_nothing(states: Any) -> None:
    rng = RNGStatesTracker()
    rng.add("kept", 9)
    with pytest.raises(NotApplicable):
        rng.set_states(states)
    assert rng.get_states() == {"kept": 9}


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    rng = RNGStatesTracker()
    rng.add("tensor-parallel", 9)
    state = torch.get_rng_state()
    with pytest.raises(NotApplicable, match="did you mean 'tensor-parallel'"):  # noqa: SIM117
        with rng.fork("tensor_parallel"):
            pass
    assert torch.equal(torch.get_rng_state(), state)
