"""Slapo's test of generators by name (``test_random.py``), with ``RNGStatesTracker``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import schedule


def tracker(**seeds: int) -> schedule.RNGStatesTracker:
    made = schedule.RNGStatesTracker()
    for name, seed in seeds.items():
        made.add(name, seed)
    return made


def test_states_are_set() -> None:
    rng = tracker(other=1)
    rng.set_states({"state1": 1234})
    assert rng.get_states() == {"state1": 1234}


def test_states_are_reset() -> None:
    rng = tracker(state1=1234)
    rng.reset()
    assert not rng.get_states()


def test_a_state_is_added() -> None:
    before = torch.get_rng_state()
    assert tracker(state2=1111).get_states() == {"state2": 1111}
    assert torch.equal(torch.get_rng_state(), before)


def test_a_name_is_added_once() -> None:
    rng = tracker(state2=1111)
    with pytest.raises(schedule.NotApplicable, match="'state2' already"):
        rng.add("state2", 111)
    assert rng.get_states() == {"state2": 1111}


def test_a_seed_is_added_once() -> None:
    rng = tracker(state2=1111)
    with pytest.raises(schedule.NotApplicable, match="'state3' and 'state2' would draw the same numbers"):
        rng.add("state3", 1111)
    assert rng.get_states() == {"state2": 1111}


def drawn(rng: schedule.RNGStatesTracker, name: str, count: int = 4) -> tuple[Tensor, Tensor]:
    """Numbers in a block of the name, and those after it."""
    torch.manual_seed(3)
    with rng.fork(name):
        inside = torch.rand(count)
    return inside, torch.rand(4)


def test_numbers_of_a_block_follow_from_the_seed_of_its_name() -> None:
    """Another name draws others; outside, neither makes a difference. The state of a name is what its seed makes it."""
    rng = tracker(state2=1111, state3=1112)
    inside, after = drawn(rng, "state2")
    assert torch.equal(inside, drawn(tracker(same=1111), "same")[0])
    assert not torch.equal(inside, drawn(rng, "state3")[0])
    assert torch.equal(after, drawn(rng, "state3", count=9)[1])
    assert rng.get_states() == {"state2": 1111, "state3": 1112}
