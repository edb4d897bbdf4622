"""A scheduled model trains like an untouched one on two processes, whether it is scheduled before or after wrapping."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.adversary.curves import Run, compare, observed
from tests.adversary.test_curves import NAMES, RULES, mutated
from tests.adversary.ways_distributed import DISTRIBUTED_WAYS
from tests.distributed import launch


def trains_alike(mesh: Any, way: str, name: str, rules: str) -> None:
    """Each rank has data of its own."""
    train = partial(DISTRIBUTED_WAYS[way], mesh=mesh)
    ours, theirs = (observed(train, Run(name, each, seed=dist.get_rank())) for each in (rules, None))
    compare(ours, theirs)


def wrong_constant_shows(mesh: Any, way: str) -> None:
    """The comparison fails for a rule with a wrong constant."""
    train = partial(DISTRIBUTED_WAYS[way], mesh=mesh)
    with mutated() as rule:
        ours = observed(train, Run("gpt2", [rule], seed=dist.get_rank()))
    theirs = observed(train, Run("gpt2", None, seed=dist.get_rank()))
    with pytest.raises(AssertionError, match="differ"):
        compare(ours, theirs, documented="")


def cases() -> list[Any]:
    """Each way with one model and one set of rules; the other pairs take longer and are marked slow."""
    found = []
    for place, way in enumerate(DISTRIBUTED_WAYS):
        for number, (name, rules) in enumerate((name, rules) for rules in RULES for name in NAMES):
            marks: list[Any] = [] if number == (5 * place) % 8 else [pytest.mark.slow]
            found.append(pytest.param(way, name, rules, marks=marks, id=f"{way}-{name}-{rules}"))
    return found


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("way", "name", "rules"), cases())
def test_trains_alike(way: str, name: str, rules: str) -> None:
    launch.passes(partial(trains_alike, way=way, name=name, rules=rules))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] if place else []) for place, way in enumerate(DISTRIBUTED_WAYS)],
)
def test_a_wrong_constant_shows(way: str) -> None:
    launch.passes(partial(wrong_constant_shows, way=way))
